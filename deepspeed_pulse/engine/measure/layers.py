"""Measuring what each layer costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_pulse.engine.device import DeviceClock, DeviceMemory
from deepspeed_pulse.engine.measure.optimizer import Trained
from deepspeed_pulse.engine.measure.probe import LayerInputs, Probe, Visits
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.profile import LayerCost
from deepspeed_pulse.runtime.payload import num_bytes, tensors_in
from deepspeed_pulse.runtime.recomputing import keeping_nothing
from deepspeed_pulse.runtime.state import frozen_bytes, param_bytes

REPEATS = 5
"""Times that a layer is measured after its warm-up, if it is quick."""

_FEWEST_REPEATS, _ENOUGH_MS = 3, 500.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs of the layers visited; ``value_bytes``: per named value its bytes and whether it has a gradient.

    ``dtype``: of the last layer with a floating parameter; None without one. ``trained``: every trained parameter.
    """

    layers: tuple[LayerCost, ...]
    value_bytes: dict[str, tuple[int, bool]]
    dtype: str | None
    trained: tuple[Trained, ...]


def measure_layers(
    graph: Graph,
    build: Sequence[Callable[[], Any]],
    start: LayerInputs,
    device: torch.device,
    clock: DeviceClock | None = None,
    layers: range | None = None,
) -> Measured:
    """Run every layer forward and backward on one batch; medians of a few repeats after a warm-up.

    ``build``, ``start`` and ``layers`` as of :class:`Visits`. ``clock`` takes the times; None: the device's.
    """
    visits = Visits(graph, build, start, device, layers)
    costs: list[LayerCost] = []
    trained: list[Trained] = []
    # The random state is put back: measuring must not change the run that follows.
    with torch.random.fork_rng(devices=[]):
        memory = DeviceMemory(device)
        for probe in visits:
            costs.append(_measure(probe, clock or DeviceClock(device), memory))
            trained += [(p.numel(), str(p.dtype).removeprefix("torch.")) for p in probe.parameters if p.requires_grad]
    return Measured(layers=tuple(costs), value_bytes=visits.value_bytes, dtype=visits.dtype, trained=tuple(trained))


def _measure(probe: Probe, clock: DeviceClock, memory: DeviceMemory) -> LayerCost:
    kept = probe.first_run()
    probe.backward()
    forward_workspace_bytes, workspace_bytes = _workspace_bytes(probe, memory, kept.activation_bytes)
    rerun_workspace_bytes = _rerun_workspace_bytes(probe, memory)
    times = _times(probe, clock)
    both = [forward + backward for forward, backward in times]
    backward_ms = statistics.median(backward for _, backward in times)
    input_grad_ms, weight_grad_ms = _halves(probe, clock, backward_ms)
    halves = (0, 0, 0) if weight_grad_ms is None else _between_halves(probe, memory)
    late_bytes, halves_workspace_bytes, weight_workspace_bytes = halves
    return LayerCost(
        name=probe.name,
        forward_ms=statistics.median(forward for forward, _ in times),
        backward_ms=backward_ms,
        weight_grad_ms=weight_grad_ms,
        input_grad_ms=input_grad_ms,
        param_bytes=param_bytes(probe.parameters),
        frozen_bytes=frozen_bytes(probe.parameters),
        activation_bytes=kept.activation_bytes,
        output_bytes=kept.output_bytes,
        unkept_output_bytes=kept.unkept_output_bytes,
        workspace_bytes=workspace_bytes,
        forward_workspace_bytes=forward_workspace_bytes,
        rerun_bytes=kept.rerun_bytes,
        rerun_workspace_bytes=rerun_workspace_bytes,
        late_bytes=late_bytes,
        halves_workspace_bytes=halves_workspace_bytes,
        weight_workspace_bytes=weight_workspace_bytes,
        spread=(max(both) - min(both)) / statistics.median(both) if any(both) else 0.0,
    )


def _workspace_bytes(probe: Probe, memory: DeviceMemory, activation_bytes: int) -> tuple[int, int]:
    """What a forward holds at most beyond what it keeps, and a backward beyond what it found."""
    probe.forget()
    before = memory.allocated()
    memory.begin()
    probe.run()
    forward = memory.peak() - before - activation_bytes
    kept = memory.allocated()
    memory.begin()
    probe.backward()
    return max(0, forward), max(0, memory.peak() - kept)


def _rerun_workspace_bytes(probe: Probe, memory: DeviceMemory) -> int:
    """What a forward that keeps nothing for backward holds at most, without what it stashes."""
    probe.forget()
    before = memory.allocated()
    memory.begin()
    with keeping_nothing():  # as checkpointing runs it
        stashed = probe.run().stashed
    stashed_bytes = num_bytes([tensor for value in stashed.values() for tensor in tensors_in(value)])
    return max(0, memory.peak() - before - stashed_bytes)


def _times(probe: Probe, clock: DeviceClock) -> list[tuple[float, float]]:
    """(forward, backward) in ms of several runs, of a slow layer fewer."""
    times: list[tuple[float, float]] = []
    while len(times) < REPEATS and (len(times) < _FEWEST_REPEATS or sum(map(sum, times)) < _ENOUGH_MS):
        start = clock.mark()
        probe.run()
        middle = clock.mark()
        probe.backward()
        began, half, ended = clock.times_ms([start, middle, clock.mark()])
        times.append((half - began, ended - half))
    return times


def _halves(probe: Probe, clock: DeviceClock, backward_ms: float) -> tuple[float | None, float | None]:
    """What a backward in two halves takes for inputs and for weights, together no less than a whole one.

    None where it cannot be run in halves: a layer's own autograd function may be differentiated once only.
    """
    times = []
    for _ in range(_FEWEST_REPEATS):
        probe.run(in_halves=True)
        start = clock.mark()
        try:
            probe.input_half()
            middle = clock.mark()
            probe.weight_half()
        except Exception:  # whatever a layer's own function raises
            return None, None
        times.append((clock.mean_ms([(start, middle)]), clock.mean_ms([(middle, clock.mark())])))
    inputs, weights = (statistics.median(column) for column in zip(*times, strict=True))
    weight_ms = min(weights, backward_ms)
    return max(inputs + weights, backward_ms) - weight_ms, weight_ms


def _between_halves(probe: Probe, memory: DeviceMemory) -> tuple[int, int, int]:
    """What the first half of a backward keeps for the second, and what each holds at most beyond that."""
    probe.run(in_halves=True)
    before = memory.allocated()
    memory.begin()
    probe.input_half()
    late, first = probe.late_bytes(), memory.peak() - before
    before = memory.allocated()
    memory.begin()
    probe.weight_half()
    return late, max(0, first - late), max(0, memory.peak() - before)
