"""What rank 0 prints and writes: the plan at start, measured beside predicted, the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from deepspeed_pulse.engine.costs import parameter_counts
from deepspeed_pulse.engine.planning import Planned
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.timeline import Span, Timeline
from deepspeed_pulse.report.tables import measured_table, plan_table
from deepspeed_pulse.report.trace import write_trace
from deepspeed_pulse.runtime.rank import Stats

__all__ = ["joined_timeline", "print_measured", "print_plan", "write_trace"]


def print_plan(planned: Planned, graph: Graph, layers: Sequence[Any]) -> None:
    """The start-up table."""
    table = plan_table(
        planned.plan,
        layer_names=[layer.name for layer in graph.layers],
        param_counts=parameter_counts(layers),
        costs=planned.costs,
    )
    Console().print(table)


def print_measured(plan: Plan, timeline: Timeline, stats: Sequence[Stats], step_ms: float) -> None:
    """Measured figures beside the predicted ones."""
    table = measured_table(
        plan,
        step_ms=step_ms,
        bubble_ratio=timeline.bubble_ratio,
        peak_bytes=[found.peak_live_bytes for found in stats],
        idle_ms=[found.idle_ms for found in stats],
    )
    Console().print(table)


def joined_timeline(rows: Sequence[Sequence[Span]]) -> Timeline:
    """Spans of all ranks as one timeline that starts at zero."""
    spans = [span for row in rows for span in row]
    start = min((span.start_ms for span in spans), default=0.0)
    moved = tuple(
        Span(rank=s.rank, action=s.action, start_ms=s.start_ms - start, end_ms=s.end_ms - start) for s in spans
    )
    return Timeline(num_ranks=len(rows), spans=moved)
