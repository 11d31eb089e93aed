"""What DeepSpeed's monitor (TensorBoard, WandB, CSV, Comet) is told of a step, under ``Train/Pulse/...``.

Upstream writes its loss in every step, from the first rank alone. These figures are gathered from the ranks of a
pipeline, so they come in every ``steps_per_print``-th step, when upstream prints its line, or in every tenth where that
is not set; without a monitor nothing is gathered. The horizontal axis is upstream's: samples so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.ir.plan import Estimate
from deepspeed_pulse.ir.run import MeasuredStep, bytes_by_kind

MOST_STEPS = 1000
"""Whose times are kept for the next figures, which may never come."""


def share_monitor(engine: Any) -> None:
    """A monitor that the config of one rank asks for is every rank's, whose figures it gets. Collective."""
    engine.monitor.enabled = any(told_by_all(bool(engine.monitor.enabled)))


def due(engine: Any, step: int) -> bool:
    """True when figures of this step (from 1) are written; the same on every rank."""
    return bool(engine.monitor.enabled) and step % (engine.steps_per_print() or 10) == 0


def write(engine: Any, figures: Mapping[str, float]) -> None:
    """Give figures to the monitor; called on global rank 0."""
    samples = engine.global_samples
    engine.monitor.write_events([(f"Train/Pulse/{name}", value, samples) for name, value in figures.items()])


def figures_of(measured: MeasuredStep, *, mean_step_ms: float, predicted: Estimate | None) -> dict[str, float]:
    """Name to value: ms, bytes, ratios. ``mean_step_ms``: of the steps since the last events."""
    found: dict[str, float] = {
        "step_ms": mean_step_ms,
        "makespan_ms": measured.timeline.makespan_ms,
        "bubble_ratio": measured.timeline.bubble_ratio,
        "idle_ms": max(rank.idle_ms for rank in measured.ranks),
        "peak_live_bytes": max(rank.peak_live_bytes for rank in measured.ranks),
        "local_value_bytes": sum(rank.local_value_bytes for rank in measured.ranks),
        **bytes_figures(measured.p2p_bytes),
    }
    if predicted is not None:
        found |= {
            "predicted_step_ms": predicted.step_ms,
            "predicted_bubble_ratio": predicted.bubble_ratio,
            "predicted_peak_bytes": max(predicted.peak_bytes),
        }
    return found


def bytes_figures(p2p_bytes: Mapping[str, int]) -> dict[str, float]:
    """``p2p_bytes_hidden``, ``p2p_bytes_hidden_grad``, ``p2p_bytes_value``, ``p2p_bytes_value_grad``."""
    return {f"p2p_bytes_{kind}": sent for kind, sent in bytes_by_kind(p2p_bytes).items()}
