"""The best cuts of a space, key after key: load, largest stage, bytes.

Named values that change ranks load links between any two ranks, which a dynamic program over ranks cannot see. So the
programs solve the problem without them. Where the cuts found load no link beyond that, they are optimal. Else a
depth-first search over the same states decides, ordered and bounded by the programs' best values, and counting the
values' links of the ranks placed so far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deepspeed_pulse.planner.partition.cut_costs import CutCosts, Score
from deepspeed_pulse.planner.partition.space import CutSpace, Stage, boundaries, slack

Cuts = tuple[int, ...]
Space = CutSpace[Any]
MakeSpace = Callable[[float], Space]
"""A space from the compute a rank may have."""

MAX_NODES = 20_000
"""Of one depth-first search; what is found by then is taken."""

MAX_STATES = 400_000
"""Of a space; a larger one is not solved."""

MAX_EDGES = 10**9
"""Of a space that is searched, each of which takes a byte; a larger one is not."""

_ANY = float("inf")
_WINDOWS = (1.02, 1.1, 1.3, 1.7, 3.0, _ANY)


class TooLarge(Exception):
    """For a dynamic program in reasonable time; internal, local search takes over."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Cuts, their score, a lower bound on any cuts' load, and whether no other cuts are better."""

    cuts: Cuts
    score: Score
    bound_ms: float
    exact: bool


def relaxed(
    make: MakeSpace, weights: CutCosts, tolerance: float = 0.0, most: float = _ANY
) -> tuple[Cuts, float] | None:
    """Best cuts if named values loaded no link, and their load; None when none has a load of at most ``most``.

    Raises:
        TooLarge: the space has more than ``MAX_STATES`` states.
    """
    space = _smallest(make, weights, most)
    if space is None:
        return None
    bound = space.solve(space.load_ms, total=False)
    if tolerance:
        space = _within_memory(make(bound * (1 + tolerance)))
    return _keys(space, bound, tolerance), bound


def solve(make: MakeSpace, weights: CutCosts, depth: Cuts, tolerance: float, most: float = _ANY) -> Solution | None:
    """Best cuts of a space; None when memory allows none with a load of at most ``most``, values not counted.

    Raises:
        TooLarge: the space has more than ``MAX_STATES`` states.
    """
    start = relaxed(make, weights, tolerance, most)
    if start is None:
        return None
    cuts, bound = start
    score = weights.score(cuts, depth)
    exact = score.load_ms <= slack(bound * (1 + tolerance))
    if exact and tolerance:  # which is a share of the load with values' links: cuts must have the bound with them too
        plain = relaxed(make, weights, most=most)
        exact = plain is not None and weights.score(plain[0], depth).load_ms <= slack(bound)
    if exact:
        return Solution(cuts=cuts, score=score, bound_ms=bound, exact=True)
    search = _Search(make, weights, depth, tolerance, cuts)
    with suppress(TooLarge):
        return search.run(bound)
    return Solution(cuts=search.best, score=search.score, bound_ms=bound, exact=False)


def _smallest(make: MakeSpace, weights: CutCosts, most: float) -> Space | None:
    """The space with the least compute per rank that holds the best load."""
    for factor in _WINDOWS:
        space = make(min(most, weights.ideal_ms * factor))
        if sum(map(len, space.states)) > MAX_STATES:
            raise TooLarge
        _within_memory(space)
        load = space.solve(space.load_ms, total=False)
        if load <= slack(space.most_ms) and load < _ANY:
            return space
        if space.most_ms == most:
            return None
    return None


def _within_memory(space: Space) -> Space:
    most = space.weights.memory_bytes
    if most is not None:
        space.limit(space.all_memory, most)
    return space


def _keys(space: Space, load: float, tolerance: float) -> Cuts:
    """The keys after the load, in the space's own terms."""
    if not tolerance:
        space.drop_states(load)
    space.limit(space.load_ms, load * (1 + tolerance))
    if not tolerance:
        space.limit(space.stage_ms, space.solve(space.stage_ms, total=False))
    space.solve(space.crossing_bytes, total=True)
    return space.trace()


class _Search:
    """Depth first from the last rank to the first, one key after the other."""

    def __init__(self, make: MakeSpace, weights: CutCosts, depth: Cuts, tolerance: float, cuts: Cuts) -> None:
        self.make, self.weights, self.depth, self.tolerance = make, weights, depth, tolerance
        self.nodes = MAX_NODES
        self.best, self.score = cuts, weights.score(cuts, depth)

    def run(self, bound: float) -> Solution:
        space = self._made(self.score.load_ms)
        space.solve(space.load_ms, total=False)
        self._minimise(space, _ANY, lambda score: score.load_ms)
        least = self.score.load_ms
        load = least * (1 + self.tolerance)
        space = self._made(load)
        space.limit(space.load_ms, load)
        if not self.tolerance:
            space.solve(space.stage_ms, total=False)
            self._minimise(space, load, lambda score: score.stage_ms)
            space.limit(space.stage_ms, self.score.stage_ms)
        space.solve(space.crossing_bytes, total=True)
        self._minimise(space, load, lambda score: score.bytes)
        exact = self.nodes > 0
        return Solution(cuts=self.best, score=self.score, bound_ms=least if exact else bound, exact=exact)

    def _made(self, most_ms: float) -> Space:
        space = self.make(most_ms)
        if space.num_edges > MAX_EDGES:
            raise TooLarge
        return _within_memory(space)

    def _minimise(self, space: Space, load: float, key: Callable[[Score], float]) -> None:
        """Replace the best cuts by those with a smaller key, among cuts within ``load``."""
        self._space_now, self._load, self._key = space, load, key
        for reach, state in space.ends():
            self._visit(space.num_ranks, reach, state, [])

    def _worse(self, value: float) -> bool:
        return value >= self._key(self.score) - 1e-9 * max(1.0, abs(value))

    def _visit(self, k: int, reach: float, state: Any, stages: list[Stage]) -> None:
        if self.nodes <= 0 or self._worse(reach):
            return
        self.nodes -= 1
        link = self.weights.link_ms(self.weights.traffic(stages))
        if link > slack(self._load) or (self._load == _ANY and self._worse(link)):
            return
        if k == 0:
            cuts = boundaries(stages)
            score = self.weights.score(cuts, self.depth)
            if score.load_ms <= slack(self._load) and not self._worse(self._key(score)):
                self.best, self.score = cuts, score
            return
        for value, before in self._space_now.before(k, state):
            if self._worse(value) or self.nodes <= 0:
                return
            self._visit(k - 1, value, before, [*stages, *self._space_now.stages(k, before, state)])
