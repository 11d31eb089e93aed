"""What the layers of a job change in place: all ranks of a pipeline find it together, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepspeed_pulse.engine.collectives import raise_everywhere, told_by_all
from deepspeed_pulse.engine.communicator import PipelineCommunicator
from deepspeed_pulse.engine.conditioning import Estimates
from deepspeed_pulse.engine.device import same_random_numbers
from deepspeed_pulse.engine.measure.probe import moved
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.errors import PulseError, RunError, add_note, in_words
from deepspeed_pulse.ir.effects import Effects, joined
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import Channel
from deepspeed_pulse.runtime.discovery import Reach, begin, discover
from deepspeed_pulse.runtime.extra import checked
from deepspeed_pulse.runtime.payload import tensors_in
from deepspeed_pulse.runtime.protocols import Batches
from deepspeed_pulse.runtime.stage import BoundLayer

CPU = torch.device("cpu")


@dataclass(kw_only=True)
class Discovery:
    """Runs the first microbatch through the pipeline once, forward, layer by layer.

    ``plan``: with the routes of batch entries that some ranks are not given; ``communicator``: with its channels open.
    ``layers``: this rank's, by index. ``encoded``: names that frozen parts make. ``number``: of the microbatch, for
    layers that are seeded. ``estimates``: tried too, on what a last layer gives.
    """

    plan: Plan
    graph: Graph
    layers: Mapping[int, BoundLayer]
    encoded: Collection[str]
    seat: Seat
    communicator: PipelineCommunicator
    number: int
    estimates: Estimates | None = None
    _values: dict[str, Any] = field(default_factory=dict, init=False)
    _hidden: Any = field(default=None, init=False)
    _read: dict[str, Any] = field(default_factory=dict, init=False)
    """Of the data of this rank, by name."""
    _reach: Reach = field(default_factory=Reach, init=False)
    _own: Exception | None = field(default=None, init=False)
    _told: PulseError | None = field(default=None, init=False)
    """What failed, as other ranks are told."""
    _found: dict[int, Effects] = field(default_factory=dict, init=False)

    def run(self, batches: Batches) -> tuple[Effects, ...]:
        """The effects of all layers, the same on every rank; every rank of the world calls it.

        What any rank met is every rank's PulseError. A layer's own exception keeps its class where it was raised.
        """
        with same_random_numbers(self.seat.device):
            self._guarded(lambda: self._begin(batches), "the first microbatch")
            for stage in range(self.plan.num_stages):
                if self.plan.placement[stage] == self.seat.rank:
                    if stage in self.plan.placement.starts[1:]:
                        self._guarded(partial(self._begin_another, stage, batches), f"stage {stage}")
                    self._guarded(partial(self._run_stage, stage), f"stage {stage}")
                    if self.plan.placement.after(stage) is None:
                        self._guarded(partial(self._try_estimate, stage, batches), f"stage {stage}")
                self._hand_on(stage)
        if self._own is not None:
            told_by_all(self._told)
            raise self._own
        raise_everywhere(self._told, "trying the layers")
        parts = told_by_all(self._found, self.seat.group)
        return joined(parts, len(self.graph.layers))

    def _begin(self, batches: Batches) -> None:
        names = [value.name for value in self.graph.batch_entries]
        first = self.seat.rank == self.plan.placement[0]
        here = {name for layer in self.layers.values() for name in layer.declared.pop}
        sent = {route.name for route in self.plan.routes if route.hops}
        # the first rank sees all of the data, but an encoder's result only if it reads or sends it
        wanted = [name for name in names if name in here or (first and (name in sent or name not in self.encoded))]
        mine = {name: batches.entry(name, 0) for name in wanted if batches.has_entry(name)}
        inputs = batches.inputs(0, 0) if first else ()
        self._read = {**mine, "the first layer's input": inputs}
        self._hidden, self._values, reach = begin(inputs, mine)
        if first:
            self._reach = reach

    def _begin_another(self, stage: int, batches: Batches) -> None:
        """A further backbone, of which every rank reads its own data."""
        backbone = self.plan.placement.backbone_of(stage)
        self._hidden, _, self._reach = begin(batches.inputs(0, backbone), {}, backbone=backbone)

    def _guarded(self, work: Callable[[], None], where: str) -> None:
        """Do it unless something failed before, here or on a rank before this one; what fails is told at the end."""
        if self._told is not None:
            return
        where = f"before the first step, pipeline rank {self.seat.rank}, {where}, microbatch 0"
        try:
            work()
        except PulseError as problem:
            self._told = type(problem)(f"{where}: {problem}")
        except Exception as problem:  # a layer's own
            add_note(problem, where)
            if other := self._other_precision():
                add_note(problem, other)
            self._own, self._told = problem, RunError(in_words(problem))

    def _other_precision(self) -> str | None:
        """What this rank reads in another precision than 16 bit weights have: torch does not say which entry it is."""
        functions = (layer.function for layer in self.layers.values())
        parameters = (p for f in functions if isinstance(f, torch.nn.Module) for p in f.parameters())
        weights = {p.dtype for p in parameters if p.is_floating_point()}
        if weights not in ({torch.bfloat16}, {torch.float16}):
            return None
        floats = {n: {t.dtype for t in tensors_in(v) if t.is_floating_point()} for n, v in self._read.items()}
        names = [name for name, found in floats.items() if found - weights]
        known, wanted = ", ".join(names), str(*weights).removeprefix("torch.")
        return f"the weights are {wanted}, but not what is read of the data: {known}; cast it there" if names else None

    def _run_stage(self, stage: int) -> None:
        layers = {index: self.layers[index] for index in self.plan.stage_layers(stage)}
        self._hidden, found = discover(layers, self.graph, self._hidden, self._values, self._reach, number=self.number)
        self._found.update(found)

    def _try_estimate(self, stage: int, batches: Batches) -> None:
        """A BatchError where what is made of a backbone's output is not what its layers read."""
        backbone = self.plan.placement.backbone_of(stage)
        for one in self.plan.conditioning:
            if self.plan.placement.backbone_of(self.plan.stage_of(one.layers[0])) == backbone:
                assert self.estimates is not None
                with torch.no_grad():
                    checked(self.estimates.of_step()(self._hidden, 0, backbone), batches.entry(one.entry, 0))

    def _hand_on(self, stage: int) -> None:
        """What a stage gives to other ranks: the hidden state to the next one's, values along their routes."""
        placement = self.plan.placement
        hops = [(r.name, placement[b]) for r in self.plan.routes for a, b in r.hops if a == stage]
        after = placement.after(stage)
        following = None if after is None else placement[after]
        for target in sorted({following, *(rank for _, rank in hops)} - {None, placement[stage]}):  # type: ignore[type-var]
            if placement[stage] == self.seat.rank:
                names = [name for name, rank in hops if rank == target]
                self._send(target, names, with_hidden=target == following)  # type: ignore[arg-type]
            elif target == self.seat.rank:
                self._receive(placement[stage])

    def _send(self, target: int, names: Sequence[str], *, with_hidden: bool) -> None:
        values, hidden = {}, None
        if self._told is None:
            # not the labels, which no layer reads
            values = {name: moved(self._values[name], CPU) for name in names if name in self._values}
            hidden = (moved(self._hidden, CPU), self._reach) if with_hidden else None
        item = (self._told, values, hidden)
        self.communicator.send_object(item, Channel(self.seat.rank, target))

    def _receive(self, source: int) -> None:
        told, values, hidden = self.communicator.receive_object(Channel(source, self.seat.rank))
        self._told = self._told or told
        self._values.update({name: moved(value, self.seat.device) for name, value in values.items()})
        if hidden is not None:
            self._hidden, self._reach = moved(hidden[0], self.seat.device), hidden[1]
