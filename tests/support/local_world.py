"""All ranks of a plan in one process: the whole runtime, without processes or DeepSpeed.

Messages go through mailboxes that keep the order of their channel, as every real backend does.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepspeed_pulse.ir.carried import Part, carried_actions, isolated, updates_at
from deepspeed_pulse.ir.channels import make_traffic, unit_clock
from deepspeed_pulse.ir.effects import Effects, joined, with_versions
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan, make_routes
from deepspeed_pulse.ir.program import Channel, Program
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.runtime.discovery import begin, discover
from deepspeed_pulse.runtime.extra import Estimate
from deepspeed_pulse.runtime.holdings import Stats
from deepspeed_pulse.runtime.rank import RankPart, RankRuntime
from deepspeed_pulse.runtime.recomputing import Checkpoint, non_reentrant
from deepspeed_pulse.runtime.stage import BoundLayer, Stage
from deepspeed_pulse.runtime.usage import Usage

LossFunction = Callable[[Any, int], Any]


class Mailboxes:
    """A communicator for all ranks of one process; a receive waits only for what was sent already."""

    def __init__(self) -> None:
        self._mail: dict[Channel, deque[torch.Tensor]] = defaultdict(deque)
        self._posted: dict[Channel, deque[torch.Tensor]] = defaultdict(deque)

    def isend(self, tensor: torch.Tensor, channel: Channel) -> _Arrival:
        self._mail[channel].append(tensor.clone())
        self._match(channel)
        return _Arrival((), tensor, channel)  # a copy was sent: the buffer is free at once

    def irecv(self, tensor: torch.Tensor, channel: Channel) -> _Arrival:
        self._posted[channel].append(tensor)
        self._match(channel)
        return _Arrival(self._posted[channel], tensor, channel)

    def _match(self, channel: Channel) -> None:
        mail, posted = self._mail[channel], self._posted[channel]
        while mail and posted:
            posted.popleft().copy_(mail.popleft())


@dataclass
class _Arrival:
    posted: Iterable[torch.Tensor]
    tensor: torch.Tensor
    channel: Channel

    def wait(self, timeout_seconds: float) -> None:
        assert all(t is not self.tensor for t in self.posted), f"nothing was sent on {self.channel}"


@dataclass(frozen=True)
class LocalDevice:
    """The CPU, with the loss divided by the number of microbatches."""

    microbatches: int

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def mark(self) -> float:
        return time.perf_counter() * 1e3

    def times_ms(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self.microbatches


@dataclass(frozen=True)
class ListedBatches:
    """Batches that lie in a list: (inputs, entries) per microbatch; inputs of several backbones in a list."""

    batches: Sequence[tuple[Any, Mapping[str, Any]]]
    reads_entries: bool = True

    def inputs(self, microbatch: int, backbone: int) -> Any:
        found = self.batches[microbatch][0]
        return found[backbone] if isinstance(found, list) else found

    def entry(self, name: str, microbatch: int) -> Any:
        return self.batches[microbatch][1][name]

    def has_entry(self, name: str) -> bool:
        return self.reads_entries and name in self.batches[0][1]

    def release(self, microbatch: int) -> None:
        """A list keeps its items."""


class LocalWorld:
    """Runs steps of a plan with all its ranks in this process.

    Args:
        plan: what to run.
        graph: the layer list's declarations.
        functions: one callable per layer.
        loss_fn: ``loss_fn(output, microbatch)``, of each backbone where there are several.
        checkpoint, interval: how layers that the plan recomputes run; see :class:`Stage`.
        mailboxes: what messages go through, where somebody watches them.
        seed: ``seed(layer, microbatch)``, called before a layer runs.
        estimate: ``estimate(output, microbatch, backbone)``, where the plan has extra forwards.
        update: ``update(backbone)``, called when a backbone's step has ended, where some are carried over.

    Attributes:
        number: of the step whose loss was computed last, from 1.
        losses: of the last step, by microbatch; of several backbones their sum. What is carried over counts where it
            was computed.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        functions: Sequence[Callable[..., Any]],
        loss_fn: LossFunction | Sequence[LossFunction],
        *,
        checkpoint: Checkpoint = non_reentrant,
        interval: int = 1,
        mailboxes: Mailboxes | None = None,
        seed: Callable[[int, int], None] | None = None,
        estimate: Estimate | None = None,
        update: Callable[[int], None] | None = None,
    ) -> None:
        self._rolled, self._update = plan, update
        self._carried, self._updates = carried_actions(plan), updates_at(plan)
        self._runs_on, self.number = False, 0
        plan = isolated(plan)
        self._plan, self._graph, self._functions = plan, graph, functions
        self._checkpoint, self._interval, self._seed = checkpoint, interval, seed
        self._traffic = make_traffic(plan)
        self._effects: dict[bool, tuple[Effects, ...]] = {}
        self._steps = 0
        self.losses: dict[int, torch.Tensor] = {}
        """By microbatch; of several backbones their sum."""
        mail, device = mailboxes or Mailboxes(), LocalDevice(plan.microbatches)

        def finish(rank: int, output: Any, place: int, backbone: int) -> Any:
            microbatch = self._data[place]
            self.number = self._ranks[rank].number
            loss = (loss_fn if callable(loss_fn) else loss_fn[backbone])(output, microbatch)
            self.losses[microbatch] = self.losses.get(microbatch, 0.0) + loss.detach()
            return loss

        def estimated(output: Any, place: int, backbone: int) -> Any:
            assert estimate is not None
            return estimate(output, self._data[place], backbone)

        self._ranks = [
            RankRuntime(
                rank=rank,
                communicator=mail,
                device=device,
                finish=partial(finish, rank),
                estimates=lambda: estimated,
            )
            for rank in range(plan.pipeline_ranks)
        ]

    def step(
        self,
        batches: Sequence[tuple[Any, Mapping[str, Any]]],
        *,
        training: bool = True,
        shape_keys: Sequence[int] | None = None,
        order: Sequence[int] = (),
    ) -> list[Stats]:
        """Run every action of the plan once; gradients accumulate in the layers' parameters.

        ``shape_keys``, ``order``: see :meth:`RankRuntime.begin`.
        """
        assert training or not self._runs_on
        self._steps += 1
        self._data = order or range(len(batches))
        self.losses.clear()
        if training not in self._effects:
            self._effects[training] = self._discovered(*batches[0])
        effects = self._effects[training]
        graph = with_versions(self._graph, effects)
        plan, traffic = self._plan, self._traffic
        routed = {route.name for route in plan.routes if route.hops}
        if graph is not self._graph:
            entries = [route for route in plan.routes if route.name in batches[0][1]]
            plan = replace(plan, routes=(*make_routes(plan.boundaries, plan.placement, graph.values), *entries))
            traffic = make_traffic(plan)
        part = Part.WHOLE if self._runs_on or not self._carried else Part.FIRST
        if self._carried:
            rolled = replace(self._rolled, routes=plan.routes)
            traffic = make_traffic(rolled, part)
        self._parts: list[RankPart] = []
        for runtime in self._ranks:
            reads = runtime.rank == plan.placement[0] or not routed & batches[0][1].keys()
            usage = Usage(plan, (*graph.values, *graph.batch_entries), runtime.rank)
            stages = {s: self._stage(s, graph, effects, usage) for s in plan.stages_of(runtime.rank)}
            self._parts.append(
                RankPart(
                    plan=plan,
                    traffic=traffic,
                    usage=usage,
                    stages=stages,
                    carried=self._carried,
                    runs_on=bool(self._carried),
                )
            )
            runtime.begin(
                self._parts[-1],
                ListedBatches(batches, reads_entries=reads),
                training=training,
                shape_keys=shape_keys,
                number=self._steps,
                order=order,
            )
        self._run(traffic.program, part)
        self._runs_on = bool(self._carried)
        return [runtime.finish() for runtime in self._ranks]

    def end_last(self) -> None:
        """Run what the last step carries over, where no step follows."""
        rolled = replace(self._rolled, routes=self._parts[0].plan.routes)
        traffic = make_traffic(rolled, Part.LAST)
        for runtime, part in zip(self._ranks, self._parts, strict=True):
            runtime.end_last(replace(part, traffic=traffic, runs_on=False))
        self._run(traffic.program, Part.LAST)
        self._runs_on = False
        for runtime in self._ranks:
            runtime.finish()

    def _run(self, program: Program, part: Part) -> None:
        """Every step of a program, and what ends the step of a backbone."""
        order = self._order(program)
        for backbone, counts in self._updates.items() if part is Part.WHOLE else ():
            for rank, index in [(r, i) for r, i in order if i < counts[r]]:
                self._ranks[rank].run(program[rank][index])
            order = [(rank, index) for rank, index in order if index >= counts[rank]]
            self._end(backbone)
        for rank, index in order:
            self._ranks[rank].run(program[rank][index])
        for backbone in range(len(self._rolled.backbones)) if self._carried else ():
            if (backbone in self._updates) == (part is Part.LAST):
                self._end(backbone)

    def _end(self, backbone: int) -> None:
        if self._update is not None:
            self._update(backbone)

    def _discovered(self, inputs: Any, entries: Mapping[str, Any]) -> tuple[Effects, ...]:
        """What layers change in place, found on a microbatch."""
        for one in self._plan.conditioning:
            like = inputs[self._graph.backbone_of(one.layers[0])] if isinstance(inputs, list) else inputs
            entries = {**entries, one.entry: torch.zeros_like(like)}
        read = {value.name: entries[value.name] for value in self._graph.batch_entries}
        layers = {i: self._layer(i, self._graph, None) for i in range(len(self._graph.layers))}
        found = []
        with torch.random.fork_rng(devices=[]):
            for index, backbone in enumerate(self._graph.backbones):
                hidden = inputs[index] if isinstance(inputs, list) else inputs
                hidden, values, reach = begin(hidden, read, backbone=index)
                found.append(discover({i: layers[i] for i in backbone}, self._graph, hidden, values, reach)[1])
        return joined(found, len(layers))

    def _stage(self, index: int, graph: Graph, effects: Sequence[Effects], usage: Usage) -> Stage:
        layers = [self._layer(i, graph, effects[i]) for i in self._plan.stage_layers(index)]
        return Stage(layers, usage.exports(index), checkpoint=self._checkpoint, interval=self._interval)

    def _layer(self, index: int, graph: Graph, effects: Effects | None) -> BoundLayer:
        return BoundLayer(
            graph.layers[index],
            self._functions[index],
            recompute=index in self._plan.recompute,
            seed=None if self._seed is None else partial(self._seed, index),
            effects=effects,
        )

    def timeline(self) -> Timeline:
        """What the last step ran, with times."""
        spans = tuple(span for runtime in self._ranks for span in runtime.stopwatch.spans)
        return Timeline(num_ranks=len(self._ranks), spans=spans)

    def _order(self, program: Program) -> list[tuple[int, int]]:
        """An order of (rank, step) in which everything a step needs was sent before."""
        starts = unit_clock(program, self._plan.placement)
        timed = [(start, rank, i) for rank, row in enumerate(starts) for i, start in enumerate(row)]
        return [(rank, i) for _, rank, i in sorted(timed)]
