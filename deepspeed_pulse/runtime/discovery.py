"""Finds out what layers change in place, by running each of them once on a microbatch.

Layers run on copies that share parameters, without gradients, so that neither running statistics nor a counter of the
user's own move; parameters that they change get their numbers back. What the next layers read goes on by
:class:`Reach`, from rank to rank where they lie on several.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.effects import Argument, Effects, Version
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.owning import cut_off, released
from deepspeed_pulse.runtime.payload import as_payload, map_tensors, tensors_in
from deepspeed_pulse.runtime.settling import set_version, settled
from deepspeed_pulse.runtime.stage import BoundLayer, module_of, naming, put_buffers, unstash, versions_of

_NUMBERS = 1 << 32
"""For each backbone."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where a tensor lies: number of its memory, and which part of it.

    ``graph``: the same number for tensors that are one to autograd: an object, and views of it. ``gradient``: it wants
    one.
    """

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    graph: int = field(compare=False)
    gradient: bool = field(compare=False)


Places = Sequence[tuple[Extent, Argument]]
"""Where the tensors among a layer's arguments lie, in order."""


@dataclass
class Reach:
    """What has been found so far: where the hidden state and the named values that are popped later lie."""

    hidden: tuple[Extent, ...] = ()
    values: dict[str, tuple[Extent, ...]] = field(default_factory=dict)
    tuples: set[str] = field(default_factory=set)
    next_number: int = 0


class Memory:
    """Numbers for the memory of tensors on one rank; the tensors are kept, so that no address is used twice."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._numbers: dict[int, int] = {}
        self._graphs: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._objects: list[torch.Tensor] = []

    def begin_layer(self) -> None:
        """Let go of the objects of the layer before, and with them of what it keeps for backward."""
        self._graphs.clear()
        self._objects.clear()

    def know(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> None:
        """These tensors stand for memory that has a number already."""
        for tensor, extent in zip(tensors, extents, strict=True):
            self._numbers[_address(tensor)] = extent.memory
            self._graphs[id(tensor)] = extent.graph
            self._keep(tensor)

    def extents(self, value: Any) -> tuple[Extent, ...]:
        return tuple(map(self._extent, tensors_in(value)))

    def _extent(self, tensor: torch.Tensor) -> Extent:
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        self._keep(tensor)
        self._keep(base)
        return Extent(
            memory=self._number(self._numbers, _address(tensor)),
            graph=self._number(self._graphs, id(base)),
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            gradient=tensor.requires_grad,
        )

    def _keep(self, tensor: torch.Tensor) -> None:
        self._kept.append(tensor.detach())
        self._objects.append(tensor)

    def _number(self, numbers: dict[int, int], key: int) -> int:
        if key not in numbers:
            numbers[key] = self._reach.next_number
            self._reach.next_number += 1
        return numbers[key]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def begin(hidden: Any, values: Mapping[str, Any], *, backbone: int = 0) -> tuple[Any, dict[str, Any], Reach]:
    """Copies of what a first layer finds, whose own memory counts: data of the user's is not for layers to change.

    Numbers of memory are a backbone's own, as no value passes between two.
    """
    reach = Reach(next_number=backbone * _NUMBERS)
    memory = Memory(reach)
    reach.hidden = memory.extents(hidden)
    reach.values = {name: memory.extents(value) for name, value in values.items()}
    reach.tuples = {name for name, value in values.items() if isinstance(value, (tuple, list))}

    def copied(value: Any) -> Any:
        return map_tensors(value, lambda t: t.detach().clone())

    return copied(hidden), {name: copied(value) for name, value in values.items()}, reach


def discover(
    layers: Mapping[int, BoundLayer], graph: Graph, hidden: Any, values: dict[str, Any], reach: Reach, number: int = 0
) -> tuple[Any, dict[int, Effects]]:
    """Run layers in order, once; the hidden state after them and what each of them changes.

    Args:
        layers: by index; those of one stage, or all.
        graph: declarations of all layers.
        hidden: what the first of them reads.
        values: named values at hand, by name; what is stashed is added.
        reach: where these lie; brought up to date.
        number: of the microbatch, for layers that are seeded.

    Raises:
        GraphError: a layer changes a value in a way that cannot be made the same under every plan.
    """
    memory = Memory(reach)
    memory.know(tensors_in(hidden), reach.hidden)
    last_use = {v.name: v.targets[-1] for v in (*graph.values, *graph.batch_entries)}
    found: dict[int, Effects] = {}
    for index, layer in layers.items():
        memory.begin_layer()
        names = layer.declared.pop
        for name in names:
            if name not in reach.values:  # read by this rank alone
                reach.values[name] = memory.extents(values[name])
            memory.know(tensors_in(values[name]), reach.values[name])
        if layer.seed is not None:
            layer.seed(number)
        # the same memory in graphs of their own, free to be changed
        arguments = [released(map_tensors(value, cut_off)) for value in (hidden, *(values[name] for name in names))]
        extents = [reach.hidden, *(reach.values[name] for name in names)]
        places = [(p, Argument(index=a, tensor=t)) for a, one in enumerate(extents) for t, p in enumerate(one)]
        result, changes, own = _tried(layer, arguments, places, memory)
        later = {name: reach.values[name] for name in reach.values if last_use[name] > index}
        found[index] = Effects(
            reads=tuple(frozenset(extent.memory for extent in argument) for argument in extents),
            changes=changes,
            versions=tuple(_versions(layer, later, reach.tuples, places, changes)),
            aliases=tuple(_aliases(layer, places, changes)),
            **own,
        )
        stashed: dict[str, Any] = {}
        output = unstash(layer.declared, result, stashed)
        if not graph.is_last(index):
            output = as_payload(output, f"layer {layer.declared.name} returned")
        renewed = {v.name: _renewed(later[v.name], v, arguments) for v in found[index].versions}
        reach.hidden = memory.extents(output)
        reach.values = {**later, **renewed, **{name: memory.extents(value) for name, value in stashed.items()}}
        reach.tuples |= {name for name, value in stashed.items() if isinstance(value, (tuple, list))}
        hidden = map_tensors(output, cut_off)
        values.update({name: map_tensors(value, cut_off) for name, value in stashed.items()})
    return hidden, found


def _renewed(extents: Sequence[Extent], version: Version, arguments: Sequence[Any]) -> tuple[Extent, ...]:
    """A value that was changed by something with a gradient wants one from then on."""
    now = [tensors_in(arguments[at.index])[at.tensor].requires_grad and not at.detached for at in version.tensors]
    return tuple(replace(extent, gradient=gradient) for extent, gradient in zip(extents, now, strict=True))


def _tried(
    layer: BoundLayer, arguments: Sequence[Any], places: Places, memory: Memory
) -> tuple[Any, frozenset[int], dict[str, tuple[str, ...]]]:
    """What a layer returns, the memory of its arguments that it changes, and of its module's own, by kind, the names.

    Kinds are those of :class:`Effects`.
    """
    memory.know([t for argument in arguments for t in tensors_in(argument)], [extent for extent, _ in places])
    before = versions_of(arguments)
    with naming(layer.declared), _on_a_copy(layer.function) as copied:
        result = copied.function(*arguments)
        own = {"buffers": copied.changed_buffers(), **_of_weights(copied, arguments)}
    changed = zip(places, before, versions_of(arguments), strict=True)
    return result, frozenset(extent.memory for (extent, _), a, b in changed if a != b), own


def _of_weights(layer: _Copied, arguments: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Names of the weights that it has changed, by kind: those that further forwards leave alone, and the others.

    It runs again on copies of the arguments where there are some.
    """
    weights = layer.changed_weights()
    if not weights:
        return {}
    own = [map_tensors(value, lambda t: t.detach().clone().requires_grad_(t.requires_grad)) for value in arguments]
    stay = settled(lambda: layer.function(*(released(map_tensors(value, torch.clone)) for value in own)), weights)
    trained, frozen = (
        tuple(n for n, w in weights.items() if n not in stay and w.requires_grad is trains) for trains in (True, False)
    )
    return {"weights": stay, "unsettled": trained, "unsettled_frozen": frozen}


def changed_weights(function: Callable[..., Any], arguments: Sequence[Any]) -> Effects:
    """The weights that a layer with a module changes; nothing else is looked at.

    It is left as it was, to autograd too: backwards of forwards before may still come.
    """
    module = module_of(function)
    assert module is not None
    before = {parameter: parameter._version for parameter in module.parameters()}
    own = [map_tensors(value, lambda t: t.detach().clone()) for value in arguments]
    with torch.no_grad(), _on_a_copy(function) as layer:  # where a checkpoint counts what is kept, nothing is
        layer.function(*(map_tensors(value, torch.clone) for value in own))
        found: dict[str, Any] = _of_weights(layer, own)
    for parameter, version in before.items():
        if parameter._version != version:
            set_version(parameter, version)
    return Effects(**found)


def _aliases(layer: BoundLayer, places: Places, changes: frozenset[int]) -> Iterator[tuple[Argument, Argument]]:
    """Arguments that lie in the same changed memory: the layer has to see one tensor, wherever they come from."""
    first: dict[int, tuple[Extent, Argument]] = {}
    names = ["its input", *map(repr, layer.declared.pop)]
    # those with a gradient first: the others are the same tensor without it
    for extent, argument in sorted(places, key=lambda place: not place[0].gradient):
        if extent.memory not in changes:
            continue
        other, main = first.setdefault(extent.memory, (extent, argument))
        if other != extent or (extent.gradient and extent.graph != other.graph):
            raise GraphError(
                f"layer {layer.declared.name} changes memory in place of which it reads different parts or views, as "
                f"{names[main.index]} and as {names[argument.index]}; use the out-of-place operation, or stash a copy "
                "(.clone())",
                more="in-place",
            )
        if main != argument:
            yield argument, replace(main, detached=extent.graph != other.graph)


def _versions(
    layer: BoundLayer, later: Mapping[str, Sequence[Extent]], tuples: set[str], places: Places, changes: frozenset[int]
) -> Iterator[Version]:
    """Values popped later that a layer changes, and where among its arguments they are afterwards."""
    for name, wanted in later.items():
        if not any(extent.memory in changes for extent in wanted):
            continue
        tensors = []
        for extent in wanted:
            found = next((at for p, at in places if p == extent and p.graph == extent.graph), None)
            if found is None and not extent.gradient:
                found = next((replace(at, detached=True) for p, at in places if p == extent), None)
            if found is None:
                raise GraphError(
                    f"layer {layer.declared.name} changes in place memory of {name!r}, which a later layer pops, "
                    "through a tensor of another shape, layout or gradient, or only a part of it; use the "
                    "out-of-place operation, or stash a copy (.clone())",
                    more="in-place",
                )
            tensors.append(found)
        yield Version(name=name, is_tuple=name in tuples, tensors=tuple(tensors))


@dataclass(frozen=True)
class _Copied:
    """A layer that runs in place of another, whose parameters it shares; ``module``: what holds them, if anything."""

    function: Callable[..., Any]
    module: torch.nn.Module | None = None
    buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Each, and as it was."""
    weights: dict[str, tuple[torch.nn.Parameter, list[int], torch.Tensor]] = field(default_factory=dict)
    """Each, its version and what it was."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Copied:
        module = module_of(function)
        if module is None:
            return cls(function)
        try:
            mine = copy.deepcopy(function, {id(parameter): parameter for parameter in module.parameters()})
        except Exception:  # tensors inside a graph, handles of libraries: whatever a class of the user's has
            mine = function
        copied = module_of(mine)
        assert copied is not None
        return cls(
            function=mine,
            module=copied,
            buffers={name: (buffer, buffer.clone()) for name, buffer in copied.named_buffers()},
            weights={n: (p, versions_of([p]), p.detach().clone()) for n, p in copied.named_parameters()},
        )

    def changed_buffers(self) -> tuple[str, ...]:
        # by content: running statistics change without a new version
        now = {} if self.module is None else dict(self.module.named_buffers())
        return tuple(n for n, (_, saved) in self.buffers.items() if n not in now or not torch.equal(now[n], saved))

    def changed_weights(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, (p, version, _) in self.weights.items() if versions_of([p]) != version}

    @torch.no_grad()
    def put_back(self, original: Callable[..., Any]) -> None:
        """Weights, and buffers where the original itself has run, are what they were."""
        for name, parameter in self.changed_weights().items():
            parameter.copy_(self.weights[name][2])
        if self.function is original and self.module is not None:
            put_buffers(self.module, {name: buffer for name, (buffer, _) in self.buffers.items()})
            for buffer, saved in self.buffers.values():
                buffer.data.copy_(saved)


@contextmanager
def _on_a_copy(function: Callable[..., Any]) -> Iterator[_Copied]:
    """A copy of a layer that shares its parameters; what cannot be copied runs itself. Nothing of it stays changed."""
    mine = _Copied.of(function)
    try:
        yield mine
    finally:
        mine.put_back(function)
