"""Measuring what each layer costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.profile import LayerCost
from deepspeed_pulse.runtime.payload import num_bytes, tensors_in
from deepspeed_pulse.runtime.probe import Probe, Reached, Walk
from deepspeed_pulse.runtime.stage import SavedBytes
from deepspeed_pulse.runtime.state import param_bytes

_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs of the layers visited; ``value_bytes``: per named value its bytes and whether it has a gradient.

    ``dtype``: of the last layer with a floating parameter; None without one.
    ``spread``: per layer, (largest - smallest) / median of its forward and backward together.
    """

    layers: tuple[LayerCost, ...]
    value_bytes: dict[str, tuple[int, bool]]
    dtype: str | None
    spread: tuple[float, ...]


def measure_layers(
    graph: Graph,
    build: Sequence[Callable[[], Any]],
    inputs: Any,
    entries: Mapping[str, Any],
    device: torch.device,
    synchronize: Callable[[], None] = lambda: None,
    layers: range | None = None,
) -> Measured:
    """Run every layer forward and backward on one batch; medians of a few repeats after a warm-up.

    Args:
        graph: declarations of the layers.
        build: per layer, makes it; a layer is dropped before the next is made.
        inputs, entries: what the first layer to measure finds: its input, and the values that are popped from there on.
        device: where to measure.
        synchronize: waits for the device before the clock is read.
        layers: indices of those to measure, one after the other; None for all.
    """
    walk = Walk(graph, build, Reached(hidden=inputs, values=dict(entries)), device, layers)
    # The random state is put back: measuring must not change the run that follows.
    with torch.random.fork_rng(devices=[]):
        costs, spread = zip(*(_measure(probe, synchronize) for probe in walk), strict=True)
    return Measured(layers=costs, value_bytes=walk.value_bytes, dtype=walk.dtype, spread=spread)


def _measure(probe: Probe, synchronize: Callable[[], None]) -> tuple[LayerCost, float]:
    times = [_once(probe, synchronize) for _ in range(_REPEATS + 1)][1:]
    with SavedBytes(probe.parameters) as saved:
        run = probe.run()
    for value in run.stashed.values():
        saved.add(tensors_in(value))
    cost = LayerCost(
        name=probe.name,
        forward_ms=statistics.median(f for f, _ in times),
        backward_ms=statistics.median(b for _, b in times),
        param_bytes=param_bytes(probe.parameters),
        activation_bytes=saved.bytes,
        output_bytes=num_bytes(tensors_in(run.output)),
    )
    both = [f + b for f, b in times]
    return cost, (max(both) - min(both)) / statistics.median(both)


def _once(probe: Probe, synchronize: Callable[[], None]) -> tuple[float, float]:
    synchronize()
    start = time.perf_counter()
    probe.run()
    synchronize()
    middle = time.perf_counter()
    probe.backward()
    synchronize()
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3
