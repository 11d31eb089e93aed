"""Where a trace is cut, and what then goes from layer to layer.

A value is *made anywhere* when it follows from batch entries, constants and sizes alone, without weights and chance:
every layer that reads it makes it itself. All other calls stay in the order in which the model made them.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from deepspeed_pulse.models.traced.outline import Outline
from deepspeed_pulse.models.traced.recording import BUFFER, CONSTANT, ENTRY, PARAMETER, Call
from deepspeed_pulse.models.traced.tracing import Trace


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One layer: its calls in order, and what goes in and out.

    ``takes``: the hidden state that it is given; None for the first layer, which gets the batch's first entry.
    ``gives``: the hidden state that it hands on. ``pops``: values by name, of earlier layers. ``stashes``: its own, by
    name. ``makes``: calls that any layer could make, needed here.
    """

    name: str
    calls: tuple[int, ...]
    makes: tuple[int, ...]
    takes: tuple[int, ...] | None
    gives: tuple[int, ...]
    pops: Mapping[str, int]
    stashes: Mapping[str, int]


class Dependencies:
    """Which calls are needed, and which of them any layer can make.

    ``persistent``: buffers in the state dict. ``weights``: path of a module to the number of its parameters.
    """

    def __init__(self, trace: Trace, persistent: frozenset[str], weights: Mapping[str, int]) -> None:
        self.trace, self.weights = trace, weights
        self._persistent = persistent
        self.needed = self._needed()
        self.anywhere = self._anywhere()
        self.main = [call for call in trace.calls if call.index in self.needed and call.index not in self.makes]

    @cached_property
    def makes(self) -> frozenset[int]:
        """Calls that any layer can make."""
        found = (self.trace.values[value].call for value in self.anywhere)
        return frozenset(call for call in found if call is not None)

    @cached_property
    def downstream(self) -> frozenset[int]:
        """Values that the model's first input goes into."""
        trace = self.trace
        found = {v.index for v in trace.values if v.kind == ENTRY and v.name == trace.given.first}
        for call in trace.calls:
            if any(value in found for value in call.reads):
                found.update(value for _, value in call.outputs)
                found.update(new for _, new in call.changes)
        return frozenset(found)

    @cached_property
    def weighty(self) -> list[int]:
        """Positions among the main calls of leaves with weights that the model's first input goes through."""
        return [
            at
            for at, call in enumerate(self.main)
            if call.path is not None
            and self.weights[call.path]
            and any(value in self.downstream for value in call.reads)
        ]

    def reads(self, call: Call) -> tuple[int, ...]:
        """What a call reads, with what lies in the memory that it changes and is read later."""
        return (*call.reads, *(old for old, new in call.changes if new in self._wanted and old not in call.reads))

    def _needed(self) -> frozenset[int]:
        self._wanted = set(self.trace.outputs)
        found = set[int]()
        for call in reversed(self.trace.calls):
            made = [*(value for _, value in call.outputs), *(new for _, new in call.changes)]
            keeps = call.once or (call.path is not None and call.changes)
            if keeps or any(value in self._wanted for value in made):
                found.add(call.index)
                self._wanted.update(call.reads)
                self._wanted.update(old for old, new in call.changes if new in self._wanted)
        return frozenset(found)

    def _anywhere(self) -> frozenset[int]:
        values = self.trace.values
        changed = {old for call in self.trace.calls for old, _ in call.changes}
        spoilt = {values[old].fake.untyped_storage()._cdata for old in changed}
        found = set[int]()
        for value in values:
            known = value.kind == CONSTANT or (value.kind == BUFFER and value.name not in self._persistent)
            if known or (value.kind == ENTRY and value.name != self.trace.given.first):
                found.add(value.index)
        for call in self.trace.calls:
            made = [value for _, value in call.outputs]
            with_gradients = call.setting is None or call.setting.gradients
            pure = not call.once and not call.changes and with_gradients
            shared = any(values[value].fake.untyped_storage()._cdata in spoilt for value in made)
            if pure and not shared and all(value in found for value in call.reads):
                found.update(made)
        return frozenset(found)


def cut(depends: Dependencies, outline: Outline) -> tuple[Piece, ...]:
    """Cut a trace after each of its blocks."""
    anchors = _anchors(depends, outline)
    bounds = _bounds(depends, anchors)
    layer_of = {}
    for layer, (start, end) in enumerate(itertools.pairwise(bounds)):
        layer_of.update({call.index: layer for call in depends.main[start:end]})
    return _Interface(depends, layer_of, len(bounds) - 1, _names(depends, bounds, anchors)).cuts()


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """What a layer is made around: positions of a block among the main calls, the first and the last."""

    name: str
    first: int
    last: int


def _anchors(depends: Dependencies, outline: Outline) -> list[Anchor]:
    """Blocks in order; where there are none, every leaf with weights."""
    size = {at: depends.weights[depends.main[at].path or ""] for at in depends.weighty}
    found = [at for at in depends.weighty if depends.main[at].path in outline.blocks]
    if found:
        typical = sorted(size[at] for at in found)[len(found) // 2]
        found = sorted({*found, *(at for at in depends.weighty if 2 * size[at] >= typical)})
    anchors = [Anchor(name=depends.main[at].path or "", first=at, last=at) for at in found or depends.weighty]
    return _merged(depends, outline, anchors) if outline.whole else anchors


def _merged(depends: Dependencies, outline: Outline, anchors: Sequence[Anchor]) -> list[Anchor]:
    """The blocks of an opened item's one list together, where nothing but the item's result is read behind it."""
    live, found, at = _Live(depends), list[Anchor](), 0
    while at < len(anchors):
        end, name = at + 1, anchors[at].name
        for item in outline.around(anchors[at].name):
            stop = at
            while stop < len(anchors) and anchors[stop].name.startswith(f"{item}."):
                stop += 1
            region = _region(depends, item, anchors[at].first, anchors[stop - 1].last)
            lists = {anchor.name.rpartition(".")[0] for anchor in anchors[at:stop]}
            alone = stop - at > 1 and len(lists) == 1 and item not in outline.containers
            if alone and live.is_closed(region, anchors):
                end, name = stop, item
                break
        found.append(Anchor(name=name, first=anchors[at].first, last=anchors[end - 1].last))
        at = end
    return found


def _region(depends: Dependencies, item: str, first: int, last: int) -> range:
    """Positions of the main calls in the call of an item around two blocks."""
    scopes = depends.trace.scopes
    around = next((s for s in depends.main[first].scopes if scopes[s].path == item), None)
    inside = [at for at, call in enumerate(depends.main) if around is not None and around in call.scopes]
    return range(min([first, *inside]), max([last, *inside]) + 1)


def _bounds(depends: Dependencies, anchors: Sequence[Anchor]) -> list[int]:
    """Where layers begin among the main calls, and the end of the last."""
    main = depends.main
    if not anchors:
        return [0, len(main)]
    stem = [at for at in depends.weighty if at < anchors[0].first]
    if stem:
        stem = [at for at in range(anchors[0].first) if depends.weights[main[at].path or ""] and main[at].path]
    head = [at for at in depends.weighty if at > anchors[-1].last]
    ends = [*stem[-1:], *(anchor.last for anchor in anchors)]
    starts = [*(anchor.first for anchor in anchors), *head[-1:]]
    live, bounds = _Live(depends), [0]
    for left, right in zip(ends, starts[0 if stem else 1 :], strict=False):
        bounds.append(min(range(left + 1, right + 1), key=lambda at: live.cost(bounds[-1], at)))
    return [*bounds, len(main)]


class _Live:
    """What is held where a cut falls."""

    def __init__(self, depends: Dependencies) -> None:
        trace, position = depends.trace, {call.index: at for at, call in enumerate(depends.main)}
        self._last: dict[int, int] = dict.fromkeys(trace.outputs, len(depends.main))
        self._born: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}
        for at, call in enumerate(depends.main):
            for value in depends.reads(call):
                self._last[value] = max(at, self._last.get(value, -1))
                self._readers.setdefault(value, set()).add(at)
        for one in trace.values:
            fixed = one.index in depends.anywhere or one.kind in (PARAMETER, BUFFER)
            if one.index in self._last and not fixed and (one.call is None or one.call in position):
                self._born[one.index] = -1 if one.call is None else position[one.call]
        self._bytes = {value: trace.num_bytes(value) for value in self._born}

    def is_closed(self, region: range, anchors: Sequence[Anchor]) -> bool:
        """Whether one value of what the calls in a region make is read behind it, and at most one skip ends in it."""
        starts = [anchor.first for anchor in anchors]
        gives = [v for v, born in self._born.items() if born in region and self._last[v] >= region.stop]
        ends = [v for v, born in self._born.items() if born < region.start and self._last[v] in region]
        read_by = ({bisect(starts, at) for at in self._readers[v] if at not in region} for v in ends)
        return len(gives) == 1 and sum(len(blocks) <= 2 for blocks in read_by) <= 2

    def cost(self, start: int, at: int) -> tuple[int, int, int, int]:
        """Of a cut before ``at``: bytes that the layer before it makes for later ones, bytes that are held in all.

        Where these are the same, the cut lies where what was made is read most often (a skip is whole before it is
        handed on), and early.
        """
        held = [value for value, born in self._born.items() if born < at <= self._last[value]]
        mine = [value for value in held if self._born[value] >= start]
        reads = sum(len(self._readers.get(value, ())) for value in mine)
        return sum(self._bytes[v] for v in mine), sum(self._bytes[v] for v in held), -reads, at


def _names(depends: Dependencies, bounds: Sequence[int], anchors: Sequence[Anchor]) -> list[str]:
    """A name for each layer: its block, else the last leaf with weights."""
    found = list[str]()
    for start, end in itertools.pairwise(bounds):
        blocks = [anchor.name for anchor in anchors if start <= anchor.first < end]
        mine = [depends.main[at].path or "" for at in depends.weighty if start <= at < end]
        others = [call.path for call in depends.main[start:end] if call.path]
        found.append([*blocks[:1], *mine[-1:], *others[-1:], "model"][0])
    return _unique(found)


def _unique(names: Iterable[str]) -> list[str]:
    """The names, with a number behind those that came before."""
    seen, found = Counter[str](), list[str]()
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


class _Interface:
    """What goes from layer to layer."""

    def __init__(self, depends: Dependencies, layer_of: Mapping[int, int], count: int, names: Sequence[str]) -> None:
        self._depends, self._trace, self._layer_of = depends, depends.trace, layer_of
        self._count, self._names = count, names
        self._makes = [self._makes_of(layer) for layer in range(count)]
        self._uses = self._used_by()

    def cuts(self) -> tuple[Piece, ...]:
        trace = self._trace
        born = {value: self._layer_born(value) for value in self._uses}
        owners = {v: layer for v, layer in born.items() if trace.values[v].kind in (PARAMETER, BUFFER)}
        takes: list[tuple[int, ...] | None] = [None]
        stashed: list[list[int]] = [[] for _ in range(self._count)]
        popped: list[list[int]] = [[] for _ in range(self._count)]
        for layer in range(self._count - 1):
            mine = [value for value in sorted(born) if born[value] == layer]
            near = [value for value in mine if self._uses[value] - {layer} == {layer + 1}]
            hidden = [value for value in near if value in self._depends.downstream]
            wide = [value for value in mine if layer + 1 in self._uses[value] and value not in owners]
            wide.sort(key=lambda value: (value not in self._depends.downstream, len(self._uses[value]), -value))
            hidden = hidden or wide[:1]
            takes.append(tuple(hidden))
            for value in mine:
                later = {use for use in self._uses[value] if use > layer and not (use == layer + 1 and value in hidden)}
                if later:
                    stashed[layer].append(value)
                for use in sorted(later):
                    popped[use].append(value)
        takes = takes[: self._count]
        name_of = self._value_names([value for each in stashed for value in each])
        pieces = []
        for layer in range(self._count):
            gives = takes[layer + 1] if layer + 1 < self._count else trace.outputs
            pieces.append(
                Piece(
                    name=self._names[layer],
                    calls=tuple(call.index for call in self._depends.main if self._layer_of[call.index] == layer),
                    makes=self._makes[layer],
                    takes=takes[layer],
                    gives=gives or (),
                    pops={name_of[value]: value for value in popped[layer]},
                    stashes={name_of[value]: value for value in stashed[layer]},
                )
            )
        return tuple(pieces)

    def _makes_of(self, layer: int) -> tuple[int, ...]:
        """Calls of values made anywhere that the calls of a layer need."""
        wanted = {v for call in self._calls(layer) for v in self._depends.reads(call)}
        wanted |= set(self._trace.outputs) if layer == self._count - 1 else set()
        return self._trace.calls_behind(v for v in wanted if v in self._depends.anywhere)

    def _calls(self, layer: int) -> list[Call]:
        return [call for call in self._depends.main if self._layer_of[call.index] == layer]

    def _used_by(self) -> dict[int, set[int]]:
        """The layers that read each value that is not made anywhere."""
        found: dict[int, set[int]] = {}
        for call in self._depends.main:
            for value in self._depends.reads(call):
                found.setdefault(value, set()).add(self._layer_of[call.index])
        for value in self._trace.outputs:
            found.setdefault(value, set()).add(self._count - 1)
        return {value: layers for value, layers in found.items() if value not in self._depends.anywhere}

    def _layer_born(self, value: int) -> int:
        call = self._trace.values[value].call
        if call is not None:
            return self._layer_of[call]
        if self._trace.values[value].kind == ENTRY:
            return 0
        return min([*self._uses[value], *self._held_by_leaves(self._trace.values[value].name)])

    def _held_by_leaves(self, path: str) -> list[int]:
        """Layers with a leaf that has the weight at ``path``."""
        return [
            self._layer_of[call.index]
            for call in self._depends.main
            if call.path is not None and path.startswith(f"{call.path}.")
        ]

    def _value_names(self, values: Sequence[int]) -> dict[int, str]:
        """The module that made a value; behind a second one of the same module, a number."""
        entries = {entry.name for entry in self._trace.given.entries}
        found = []
        for value in values:
            name = self._name(value)
            found.append(f"{name} (input)" if name in entries else name)
        return dict(zip(values, _unique(found), strict=True))

    def _name(self, value: int) -> str:
        one = self._trace.values[value]
        while one.kind is None:
            call = self._trace.calls[one.call or 0]
            if call.path is not None:
                return call.path
            returned = [s for s in reversed(call.scopes) if one.index in self._trace.scopes[s].returns]
            if returned and self._trace.scopes[returned[0]].path:
                return self._trace.scopes[returned[0]].path
            reads = [v for v in call.reads if v not in self._depends.anywhere and self._trace.values[v].kind is None]
            if not reads:
                others = [v for v in call.reads if self._trace.values[v].name]
                return self._trace.values[others[0]].name if others else "value"
            one = self._trace.values[max(reads)]
        return one.name or "value"
