"""Measuring how long an action with a message keeps a rank beyond its layers, in a small pipeline."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.communicator import CONNECT_SECONDS, PipelineCommunicator
from deepspeed_pulse.engine.device import EngineDevice, runs_at_once
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.ir.channels import make_traffic
from deepspeed_pulse.ir.graph import Layer
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import Action, Op
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.runtime.rank import RankPart, RankRuntime
from deepspeed_pulse.runtime.stage import BoundLayer, Stage
from deepspeed_pulse.runtime.usage import Usage

_RANKS = 2
_MICROBATCHES, _STEPS = 8, 5
_HIDDEN = 16 * 1024
"""Elements, 64 KiB."""

_IDLE_SECONDS = 0.01
"""Of the host in each action: as where it waits for a device or a peer. A host that computes all the time has its
caches warm and takes half as long for a message, and then that is little beside the layers."""


def message_pauses_ms(device: torch.device) -> list[float]:
    """What this rank did between two actions with messages and in the second beside its layer, for each message there.

    All ranks of the world call it. Each two neighbours run a wave, all at once, as ranks of a host share its cores. The
    rest is to start and to take messages, and what the runtime does itself. A rank without a neighbour has none, nor
    has a device that works on while the host sends.
    """
    if dist.get_world_size() < _RANKS or not runs_at_once(device):
        return []
    plan = _plan()
    traffic = make_traffic(plan)
    seat = Seat.of_neighbours(_RANKS, device)
    communicator = PipelineCommunicator(seat)
    communicator.open(traffic.channels)
    if seat.rank >= _RANKS:
        return []
    runtime = RankRuntime(
        rank=seat.rank,
        communicator=communicator,
        device=EngineDevice(device, nullcontext, lambda loss: loss),
        finish=lambda output, microbatch, backbone: output.mean(),
        timeout_seconds=CONNECT_SECONDS,
    )
    layers = {s: BoundLayer(Layer(name=f"layer {s}"), _Idle().to(device)) for s in plan.stages_of(runtime.rank)}
    stages = {s: Stage([layer], ()) for s, layer in layers.items()}
    hidden = torch.zeros(_HIDDEN, device=device)
    alone = _alone(_Idle().to(device), hidden)
    batches = _Same(hidden)
    part = RankPart(plan=plan, traffic=traffic, usage=Usage(plan, (), runtime.rank), stages=stages)
    rows = [[*_step(runtime, part, batches, alone)] for _ in range(_STEPS)]
    return [ms for row in rows[1:] for ms in row]  # shapes are agreed on in the first one


def _step(runtime: RankRuntime, part: RankPart, batches: _Same, alone: Mapping[Op, float]) -> Iterator[float]:
    row = part.traffic.program[runtime.rank]
    runtime.begin(part, batches, training=True)
    for step in row:
        runtime.run(step)
    runtime.finish()
    timeline = Timeline(num_ranks=_RANKS, spans=tuple(runtime.stopwatch.spans))
    pauses = timeline.pauses_ms()
    beyond = {span.work: span.end_ms - span.start_ms - alone[span.work.op] for span in timeline.spans}
    for before, after in itertools.pairwise(row):
        messages = len(before.sends) + len(after.receives)
        if messages:
            yield (pauses[before.action] + max(0.0, beyond[after.action])) / messages


def _alone(layer: torch.nn.Module, hidden: torch.Tensor) -> dict[Op, float]:
    """ms of the layer's forward and backward without a pipeline, as layers are measured; medians."""
    times: dict[Op, list[float]] = {Op.FORWARD: [], Op.BACKWARD: []}
    for _ in range(_MICROBATCHES):
        marks = [time.perf_counter()]
        output = layer(hidden.detach().requires_grad_())
        marks.append(time.perf_counter())
        output.backward(torch.ones_like(output))
        marks.append(time.perf_counter())
        for op, (start, end) in zip(times, itertools.pairwise(marks), strict=True):
            times[op].append(1e3 * (end - start))
    return {op: statistics.median(found) for op, found in times.items()}


@dataclass(frozen=True)
class _Same:
    """Of a step, each microbatch's input; there are no entries beside it."""

    hidden: torch.Tensor

    def inputs(self, microbatch: int, backbone: int) -> torch.Tensor:
        return self.hidden

    def entry(self, name: str, microbatch: int) -> Any:
        raise KeyError(name)

    def has_entry(self, name: str) -> bool:
        return False

    def release(self, microbatch: int) -> None:
        """It stays."""


class _Idle(torch.nn.Module):
    """Does next to nothing, and takes its time, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(_IDLE_SECONDS)
        output: torch.Tensor = hidden * self.scale
        output.register_hook(lambda gradient: time.sleep(_IDLE_SECONDS))
        return output


def _plan() -> Plan:
    """A wave in the plainest order: all microbatches through one stage after the other."""
    placement = Placement.wave(_RANKS)
    forward = [(Op.FORWARD, stage) for stage in range(len(placement))]
    backward = [(Op.BACKWARD, stage) for _, stage in reversed(forward)]
    row = [Action(stage, op, m) for op, stage in (*forward, *backward) for m in range(_MICROBATCHES)]
    return Plan(
        pipeline_ranks=_RANKS,
        data_parallel=1,
        microbatches=_MICROBATCHES,
        microbatch_size=1,
        boundaries=tuple(range(len(placement) + 1)),
        placement=placement,
        schedule=tuple(tuple(a for a in row if placement[a.stage] == rank) for rank in range(_RANKS)),
    )
