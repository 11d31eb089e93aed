"""A model as a list of layers and the named values that jump over layers.

A layer turns the hidden state into the next hidden state. It may *stash* values under names and *pop* values that an
earlier layer stashed (long skips, the time embedding). A popped name that no layer stashes is a *batch entry*: it comes
with the data and needs no gradient.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from deepspeed_pulse.errors import GraphError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its name, the names it stashes and the names it pops, both in order."""

    name: str
    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NamedValue:
    """A value with one producer (``source``, a layer index; None for a batch entry) and its consumers."""

    name: str
    source: int | None
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Layers in forward order. Raises :class:`GraphError` listing every violation at once.

    ``starts``: the first layer of each backbone. ``derived``: made from another list, which was checked; some of its
    values may have lost all their consumers.
    """

    layers: tuple[Layer, ...]
    derived: bool = False
    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        problems = [] if self.derived else list(self._problems())
        if problems:
            raise GraphError("the layer list does not fit together:\n  " + "\n  ".join(problems), more="names")

    @cached_property
    def values(self) -> tuple[NamedValue, ...]:
        """Stashed values in the order of their producers."""
        return tuple(
            NamedValue(name=name, source=index, targets=self._targets(name))
            for index, layer in enumerate(self.layers)
            for name in layer.stash
        )

    @cached_property
    def batch_entries(self) -> tuple[NamedValue, ...]:
        """Popped names that no layer stashes, in the order of their first use."""
        stashed = {name for layer in self.layers for name in layer.stash}
        names = dict.fromkeys(name for layer in self.layers for name in layer.pop if name not in stashed)
        return tuple(NamedValue(name=name, source=None, targets=self._targets(name)) for name in names)

    def is_last(self, index: int) -> bool:
        """True for the last layer of a backbone, whose output is what a loss is made of."""
        return index + 1 in (*self.starts, len(self.layers))

    def backbone_of(self, index: int) -> int:
        """Index of the backbone that a layer belongs to."""
        return bisect_right(self.starts, index) - 1

    @property
    def backbones(self) -> tuple[range, ...]:
        """The layers of each backbone."""
        return tuple(range(a, b) for a, b in itertools.pairwise((*self.starts, len(self.layers))))

    @property
    def uses_names(self) -> bool:
        """True when any layer stashes or pops."""
        return any(layer.stash or layer.pop for layer in self.layers)

    def values_source(self, name: str) -> str:
        """Name of the layer that stashes ``name``."""
        return next(layer.name for layer in self.layers if name in layer.stash)

    def index_of(self, name: str) -> int:
        """Index of the layer called ``name``; a :class:`GraphError` when there is none or more than one."""
        found = [i for i, layer in enumerate(self.layers) if layer.name == name]
        if len(found) != 1:
            names = [layer.name for layer in self.layers]
            raise GraphError(f"{len(found)} layers are called {name!r}, expected one{did_you_mean(name, names)}")
        return found[0]

    def _targets(self, name: str) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if name in layer.pop)

    def _problems(self) -> Sequence[str]:
        problems: list[str] = []
        producer: dict[str, int] = {}
        called = [f"layer {index} ({layer.name})" for index, layer in enumerate(self.layers)]
        for index, (where, layer) in enumerate(zip(called, self.layers, strict=True)):
            for names, verb in ((layer.stash, "stashes"), (layer.pop, "pops")):
                for name in sorted({n for n in names if names.count(n) > 1}):
                    problems.append(f"{where} {verb} {name!r} twice; name it once")
            for name in dict.fromkeys(layer.stash):
                first = producer.setdefault(name, index)
                if first != index:
                    told = f"{where} stashes {name!r}, which {called[first]} stashed already"
                    problems.append(f"{told}; a name has one producer")
        for name, source in producer.items():
            targets = self._targets(name)
            if not targets:
                popped = [n for layer in self.layers for n in layer.pop]
                told = f"{called[source]} stashes {name!r}, which no layer pops{did_you_mean(name, popped)}"
                problems.append(f"{told}; pop it or do not stash it")
            for target in (target for target in targets if target <= source):
                told = f"{called[target]} pops {name!r} before {called[source]} stashes it"
                problems.append(f"{told}; a value flows forward only")
        return problems
