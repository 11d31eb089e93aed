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

from deepspeed_pulse.ir.channels import make_traffic, unit_clock
from deepspeed_pulse.ir.effects import Effects, joined, with_versions
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan, make_routes
from deepspeed_pulse.ir.program import Channel
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.runtime.discovery import begin, discover
from deepspeed_pulse.runtime.extra import Estimate
from deepspeed_pulse.runtime.rank import RankPart, RankRuntime, Stats
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
    ) -> None:
        self._plan, self._graph, self._functions = plan, graph, functions
        self._checkpoint, self._interval, self._seed = checkpoint, interval, seed
        self._traffic = make_traffic(plan)
        self._effects: dict[bool, tuple[Effects, ...]] = {}
        self._steps = 0
        self.losses: dict[int, torch.Tensor] = {}
        """By microbatch; of several backbones their sum."""
        mail, device = mailboxes or Mailboxes(), LocalDevice(plan.microbatches)

        def finish(output: Any, place: int, backbone: int) -> Any:
            microbatch = self._data[place]
            loss = (loss_fn if callable(loss_fn) else loss_fn[backbone])(output, microbatch)
            self.losses[microbatch] = self.losses.get(microbatch, 0.0) + loss.detach()
            return loss

        def estimated(output: Any, place: int, backbone: int) -> Any:
            assert estimate is not None
            return estimate(output, self._data[place], backbone)

        self._ranks = [
            RankRuntime(rank=rank, communicator=mail, device=device, finish=finish, estimate=estimated)
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
        for runtime in self._ranks:
            reads = runtime.rank == plan.placement[0] or not routed & batches[0][1].keys()
            usage = Usage(plan, (*graph.values, *graph.batch_entries), runtime.rank)
            stages = {s: self._stage(s, graph, effects, usage) for s in plan.stages_of(runtime.rank)}
            runtime.begin(
                RankPart(plan=plan, traffic=traffic, usage=usage, stages=stages),
                ListedBatches(batches, reads_entries=reads),
                training=training,
                shape_keys=shape_keys,
                number=self._steps,
                order=order,
            )
        for rank, index in self._order():
            self._ranks[rank].run(traffic.program[rank][index])
        return [runtime.finish() for runtime in self._ranks]

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

    def _order(self) -> list[tuple[int, int]]:
        """An order of (rank, step) in which everything a step needs was sent before."""
        starts = unit_clock(self._traffic.program, self._plan.placement)
        timed = [(start, rank, i) for rank, row in enumerate(starts) for i, start in enumerate(row)]
        return [(rank, i) for _, rank, i in sorted(timed)]
