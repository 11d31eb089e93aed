"""Self-conditioning as users declare it, and what makes estimates while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.backbones import Head, index_of, own_graph
from deepspeed_pulse.engine.data.batches import StepBatches
from deepspeed_pulse.errors import ConfigError, did_you_mean
from deepspeed_pulse.ir.conditioning import SelfConditioned, drawn, placed
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.runtime.extra import Estimate, zeros_like

EVALUATION = -1
"""Stands for the number of a step in every evaluation: two on the same data give the same loss."""

_LAYER = "(self-conditioning)"
"""Stands for a layer that stashes the entry, where what the data must have is asked."""


@dataclass(frozen=True)
class SelfConditioning:
    """Some microbatches of a step run one more forward first, whose result their own forward reads.

    Exactly ``round(probability * microbatches)`` of a step's microbatches do, drawn by the module's ``base_seed`` and
    the number of the step: the same ones on all ranks, in all replicas, under every plan and after a resume. For these
    the layers that pop ``entry`` find an estimate; for all others, and in the extra forward itself, zeros of the first
    layer's input's shape and dtype. The extra forward has no gradient and draws random numbers (dropout) of its own.
    Running statistics (batch norm) move in both.

    Evaluation gives estimates to as many microbatches as training would, the same in every evaluation, so that losses
    compare with one another and with those of training.

    With several backbones pass a dict of these by backbone; entries then are each backbone's own names.

    Args:
        entry: the name under which layers pop the estimate. The data does not have it.
        probability: share of the microbatches, 0 to 1.
        estimate: ``estimate(output, entries)`` makes a tensor of the first layer's input's shape from the last layer's
            output; another dtype is cast. ``entries``: the microbatch's inputs by name, as the data has them, and the
            first layer's input; of inputs that are no dict, this one under ``input=``. It must draw no random numbers.

    Raises:
        PulseError: by ``PipelineModule``, before the first step: no layer pops the entry, the probability is none, the
            data has the entry too, or ``estimate`` gives something else than such a tensor.
    """

    entry: str
    probability: float
    estimate: Callable[[Any, Mapping[str, Any]], Any]


class DeclaredConditioning:
    """What of a module's backbones is self-conditioned, checked against its layers."""

    def __init__(self, given: Any, graph: Graph, heads: Sequence[Head]) -> None:
        self._heads = heads
        self.by_backbone: dict[int, SelfConditioning] = {}
        """By index of the backbone."""
        for name, one in _by_name(given, heads).items():
            self.by_backbone[0 if name is None else index_of(heads, name)] = one
        self.planned = tuple(self._checked(index, one, graph) for index, one in sorted(self.by_backbone.items()))
        """As plans have them, without microbatches."""

    def _checked(self, index: int, one: SelfConditioning, graph: Graph) -> SelfConditioned:
        """A ConfigError says what of it is wrong."""
        head = self._heads[index]
        where = "self_conditioning" if head.name is None else f"self_conditioning of backbone {head.name}"
        _check_values(where, one)
        name = head.value(one.entry)
        layers = tuple(i for i in head.layers if name in graph.layers[i].pop)
        stashing = [layer.name for layer in graph.layers if name in layer.stash]
        if not layers:
            own = [pop for layer in own_graph(graph, head).layers for pop in layer.pop]
            raise ConfigError(
                f"{where}: expected an entry that a layer pops, found {one.entry!r}{did_you_mean(one.entry, own)}; let "
                f"the layer that reads the estimate pop it, spec(..., pop={one.entry!r})"
            )
        if stashing:
            raise ConfigError(
                f"{where}: expected an entry that no layer stashes, found {one.entry!r}, which layer {stashing[0]} "
                "stashes; rename one of them"
            )
        return SelfConditioned(entry=name, layers=layers, probability=float(one.probability))

    def behind(self, graph: Graph) -> Graph:
        """A graph behind a layer that stashes each entry: its batch entries are what the data must have."""
        made = tuple(
            Layer(name=self._heads[index].value(_LAYER), stash=(planned.entry,))
            for index, planned in zip(sorted(self.by_backbone), self.planned, strict=True)
        )
        return Graph(layers=(*made, *graph.layers), derived=True)

    def reads_input(self, name: str) -> set[int]:
        """Layers on whose ranks a frozen part must be that makes a first layer's input: its form, and estimates."""
        found: set[int] = set()
        for index, planned in zip(sorted(self.by_backbone), self.planned, strict=True):
            head = self._heads[index]
            if head.value(head.input) == name:
                found |= {*planned.layers, head.layers[-1]}
        return found

    def zeros(self, inputs: Mapping[int, Any]) -> dict[str, torch.Tensor]:
        """What layers find where there is no estimate, by entry. ``inputs``: of each backbone's first layer.

        Raises:
            BatchError: it is not one tensor.
        """
        return {
            planned.entry: zeros_like(inputs[index])
            for index, planned in zip(sorted(self.by_backbone), self.planned, strict=True)
        }

    def check_planned(self, plan: Plan, where: str) -> None:
        """Raise a ConfigError for a plan that conditions other layers, or with another probability."""
        mine = [(one.entry, one.layers, one.probability) for one in self.planned]
        found = [(one.entry, one.layers, one.probability) for one in plan.conditioning]
        counts = [(len(one.microbatches), one.count(plan.microbatches)) for one in plan.conditioning]
        if mine != found or any(has != wants for has, wants in counts):
            raise ConfigError(
                f"{where}: self_conditioning: expected (entry, layers, probability) {mine} and as many microbatches as "
                f"that makes of {plan.microbatches}, found {found} with {[has for has, _ in counts]}; plan anew"
            )
        for one in self.planned:
            if one.probability and not one.count(plan.microbatches) and dist.get_rank() == 0:
                told = f"round({one.probability:g} x {plan.microbatches}) = 0 microbatches of a step have an estimate"
                print(f"pulse: warning: self_conditioning: {told}; use more of them", flush=True)


def _by_name(given: Any, heads: Sequence[Head]) -> dict[str | None, SelfConditioning]:
    """By name of the backbone; None where there is one."""
    several = heads[0].name is not None
    if several != isinstance(given, Mapping):
        expected = "a dict of SelfConditioning by backbone" if several else "a SelfConditioning"
        raise ConfigError(f"self_conditioning: expected {expected}, found {_shown(given)}")
    found = dict(given) if several else {None: given}
    for one in found.values():
        if not isinstance(one, SelfConditioning):
            raise ConfigError(f"self_conditioning: expected a SelfConditioning, found {_shown(one)}")
    return found


def _check_values(where: str, one: SelfConditioning) -> None:
    if not isinstance(one.entry, str) or not one.entry:
        raise ConfigError(f"{where}: entry: expected the name that a layer pops, found {one.entry!r}")
    p = one.probability
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ConfigError(f"{where}: probability: expected a number from 0 to 1, found {p!r}")
    if not callable(one.estimate):
        raise ConfigError(f"{where}: estimate: expected a function of output and entries, found {one.estimate!r}")


def _shown(value: Any) -> str:
    return "a dict" if isinstance(value, Mapping) else type(value).__name__


class Estimates:
    """Makes the estimates of steps from what extra forwards give."""

    def __init__(self, declared: DeclaredConditioning, heads: Sequence[Head]) -> None:
        self._declared, self._heads = declared, heads

    def begin(self, batches: StepBatches, order: Sequence[int]) -> None:
        """A step begins. ``order``: for each microbatch of the plan, which of the data it is; empty: the data's own."""

        def made(output: Any, microbatch: int, backbone: int) -> Any:
            data = order[microbatch] if order else microbatch
            entries = Entries(batches, data, backbone, self._heads[backbone])
            return self._declared.by_backbone[backbone].estimate(output, entries)

        self._made = made

    def of_step(self) -> Estimate:
        """Of a microbatch of the plan, what the user's function makes; of the step that has begun last, for ever."""
        return self._made


class Entries(Mapping[str, Any]):
    """The inputs of a microbatch of one backbone by its own names, on the device once they are asked for."""

    def __init__(self, batches: StepBatches, microbatch: int, backbone: int, head: Head) -> None:
        self._batches, self._microbatch, self._backbone = batches, microbatch, backbone
        part = batches.part(microbatch, backbone)
        self._entries = part.entries
        self._input = part.input_name or head.input

    def __getitem__(self, name: str) -> Any:
        if name == self._input:
            return self._batches.inputs(self._microbatch, self._backbone)
        return self._batches.moved(self._entries[name])

    def __iter__(self) -> Iterator[str]:
        yield self._input
        yield from self._entries

    def __len__(self) -> int:
        return 1 + len(self._entries)


def for_evaluation(plan: Plan, seed: int, microbatches: int) -> Plan:
    """The plan with the microbatches that get an estimate in an evaluation of so many, in the data's own order."""
    conditioning = placed(plan.conditioning, drawn(seed, EVALUATION, microbatches))
    return replace(plan, conditioning=conditioning, microbatches=microbatches)
