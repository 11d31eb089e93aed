"""What layers change in place, and what follows for a layer list that is cut.

In one process a layer that changes a tensor in place changes it for whoever reads that memory later: the next layer, a
skip that was stashed as the very tensor that went on, a batch entry. Between ranks there are copies, so the same must
be said by name: where a layer changes a value that later layers pop, it stashes the changed value under a new name, and
they pop that one. Then the result is the same under every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deepspeed_pulse.ir.graph import Graph

INPUT = "<input>"
"""Stands for a layer's input among the names that it pops."""


@dataclass(frozen=True, kw_only=True, order=True)
class Argument:
    """Which tensor of which of a layer's arguments (0 is the input). ``detached``: it is meant without its gradient."""

    index: int
    tensor: int
    detached: bool = False


@dataclass(frozen=True, kw_only=True)
class Version:
    """A named value that is another one behind a layer. ``tensors``: where the layer has it, once it has run."""

    name: str
    is_tuple: bool
    tensors: tuple[Argument, ...]


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What one layer reads and changes. Memory is known by numbers; tensors that share it have the same.

    Attributes:
        reads: memory behind each argument: the input's, then those of the popped values in order.
        changes: memory of arguments that the layer changes in place.
        versions: named values that are popped later and that this changes.
        aliases: pairs of arguments that are one tensor in one process: the second stands for the first.
        buffers: names of the buffers of its module that it changes.
        weights: of the parameters of its module that it changes, those that one more forward leaves as they are.
        unsettled: the others that train.
        unsettled_frozen: the others that do not.
    """

    reads: tuple[frozenset[int], ...] = (frozenset(),)
    changes: frozenset[int] = frozenset()
    versions: tuple[Version, ...] = ()
    aliases: tuple[tuple[Argument, Argument], ...] = ()
    buffers: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    unsettled_frozen: tuple[str, ...] = ()

    @property
    def all_weights(self) -> frozenset[str]:
        """Names of all parameters that the layer changes."""
        return frozenset((*self.weights, *self.unsettled, *self.unsettled_frozen))

    @property
    def leaves_alone(self) -> bool:
        """What the layer reads is after it as it was before."""
        return not (self.changes or self.versions or self.aliases)


def with_versions(graph: Graph, effects: Sequence[Effects]) -> Graph:
    """The layer list with a name for every version of a value; as it is where no layer changes one."""
    if not any(effect.versions for effect in effects):
        return graph
    current: dict[str, str] = {}
    layers = []
    for index, (layer, effect) in enumerate(zip(graph.layers, effects, strict=True)):
        pop = tuple(current.get(name, name) for name in layer.pop)
        found = {version.name: f"{version.name} after layer {index}" for version in effect.versions}
        current.update(found)
        layers.append(replace(layer, pop=pop, stash=(*layer.stash, *found.values())))
    return Graph(layers=tuple(layers), derived=True, starts=graph.starts)


def changed_from_outside(
    effects: Sequence[Effects], arguments: Sequence[Sequence[str]], *, until: Sequence[Effects] = ()
) -> frozenset[str]:
    """Names of what layers that run one after another read from outside and change, or let others change.

    ``arguments``: per layer, names of its arguments that come from outside; other places hold an empty string.
    ``until``: of layers after them that may change what they have read.
    """
    found: set[str] = set()
    changed = frozenset[int]().union(*(effect.changes for effect in until))
    for effect, names in reversed(list(zip(effects, arguments, strict=True))):
        changed |= effect.changes
        found.update(name for name, memory in zip(names, effect.reads, strict=True) if name and memory & changed)
    return frozenset(found)


def joined(parts: Sequence[Mapping[int, Effects]], num_layers: int) -> tuple[Effects, ...]:
    """The effects that several ranks have found, by layer index, in layer order."""
    whole = {index: effect for part in parts for index, effect in part.items()}
    return tuple(whole[index] for index in range(num_layers))
