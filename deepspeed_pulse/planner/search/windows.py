"""HiGHS on windows of a good order: what runs in a span of time is ordered anew, all else stays.

What starts before the window keeps its times, what starts after it keeps its order, so that all paths from the window
to the end are known lengths. The stash limits of a rank are rows too, which the local search can only test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from deepspeed_pulse.planner.search.exact import MAKESPAN, Row, solve_model
from deepspeed_pulse.planner.search.net import Net, Rows
from deepspeed_pulse.planner.search.paths import Paths

MAX_PAIRS = 160
"""Binaries of a window that HiGHS handles in about a second."""
_NODES = 100
"""Branch-and-bound nodes of a window: unlike seconds, the same on every machine."""


class WindowModel:
    """Rows of the model of one window; variables are nodes, pairs of nodes, and MAKESPAN."""

    def __init__(self, paths: Paths, free: Sequence[int], change: Sequence[float], limits: Sequence[float]) -> None:
        self.paths, self.net, self.upper_ms = paths, paths.net, paths.span
        self.actions = sorted(free, key=lambda node: paths.place[node])
        self.inside = set(self.actions)
        self.change, self.limits = change, limits
        self.earliest = {node: self._floor(node) for node in self.actions}
        self.pairs = [pair for pair in combinations(self.actions, 2) if self._open(*pair)]

    def _floor(self, node: int) -> float:
        """When what comes before the window lets a node start."""
        paths, rank = self.paths, self.net.machine[node]
        first = next(other for other in paths.rows[rank] if other in self.inside)
        last = paths.previous[first]
        ends = [paths.end[other] + gap for other, gap in self.net.before[node] if other not in self.inside]
        return max([paths.end[last], *ends])

    def _open(self, a: int, b: int) -> bool:
        net = self.net
        chained = any(other == b for other, _ in net.after[a])
        return net.machine[a] == net.machine[b] and net.column[a] != net.column[b] and not chained

    def latest(self, node: int) -> float:
        return self.upper_ms - self.net.duration[node]

    def precedence(self) -> Iterator[Row]:
        """t[b] >= t[a] + d[a] + message; microbatches of a column in order."""
        last: dict[int, int] = {}
        for node in self.actions:
            for other, gap in self.net.after[node]:
                if other in self.inside:
                    yield [(other, 1.0), (node, -1.0)], self.net.duration[node] + gap
            before = last.get(self.net.column[node])
            if before is not None:
                yield [(node, 1.0), (before, -1.0)], self.net.duration[before]
            last[self.net.column[node]] = node

    def exclusive(self) -> Iterator[Row]:
        """t[b] >= t[a] + d[a] - K (1 - y[a,b]) and the other way round, with K the makespan of the order known."""
        big = self.upper_ms
        for a, b in self.pairs:
            da, db = self.net.duration[a], self.net.duration[b]
            yield [(b, 1.0), (a, -1.0), ((a, b), -big)], da - big
            yield [(a, 1.0), (b, -1.0), ((a, b), big)], db

    def stash(self) -> Iterator[Row]:
        """For each F of a rank: what is stashed before it, and itself, within the limit."""
        known = set(self.pairs)
        for rank, row in enumerate(self.paths.rows):
            mine = [node for node in row if node in self.inside]
            if not mine or self.limits[rank] == float("inf"):
                continue
            already = sum(self.change[node] for node in row[: self.paths.position[mine[0]]])
            for node in (n for n in mine if self.change[n] > 0):
                terms: list[tuple[object, float]] = []
                room = self.limits[rank] - already - self.change[node]
                for other in (n for n in mine if n != node and self.change[n]):
                    weight = self.change[other]
                    if (other, node) in known:
                        terms.append(((other, node), -weight))
                    elif (node, other) in known:
                        terms.append(((node, other), weight))
                        room -= weight
                    elif self.paths.place[other] < self.paths.place[node]:
                        room -= weight
                if terms:
                    yield terms, -room

    def finish(self) -> Iterator[Row]:
        """makespan >= t[a] + d[a] + what follows: the rank's first action after the window, and consumers there."""
        for rank, row in enumerate(self.paths.rows):
            mine = [node for node in row if node in self.inside]
            if not mine:
                continue
            follows = self.paths.reach[self.paths.following[mine[-1]]]
            for node in mine:
                ways = [self.paths.reach[o] + gap for o, gap in self.net.after[node] if o not in self.inside]
                rest = max([follows, self.net.finish[node], *ways])
                yield [(MAKESPAN, 1.0), (node, -1.0)], self.net.duration[node] + rest
            assert self.net.machine[mine[0]] == rank


def windows(paths: Paths) -> list[list[int]]:
    """Spans of time, each with about as many open pairs as HiGHS handles, overlapping by half."""
    starts = sorted(range(paths.net.num_actions), key=lambda node: (paths.start(node), node))
    found, first = [], 0
    while first < len(starts):
        size, ranks = 0, [0] * paths.net.instance.num_ranks
        pairs = 0
        for node in starts[first:]:
            pairs += ranks[paths.net.machine[node]]
            ranks[paths.net.machine[node]] += 1
            if pairs > MAX_PAIRS:
                break
            size += 1
        found.append(starts[first : first + size])
        first += max(1, size // 2)
    return [window for window in found if len(window) > 1]


def reordered(
    net: Net, rows: Rows, window: Sequence[int], change: Sequence[float], limits: Sequence[float], *, seconds: float
) -> Rows | None:
    """The rows with a window in a better order; None when HiGHS finds none."""
    paths = Paths(net, rows)
    model = WindowModel(paths, window, change, limits)
    starts = {node: paths.start(node) for node in model.actions}
    values = solve_model(model, starts, seconds=seconds, max_nodes=_NODES)
    if values is None:
        return None
    order = sorted(model.actions, key=lambda node: (values[node], paths.place[node]))
    found = []
    for rank, row in enumerate(rows):
        mine = iter([node for node in order if net.machine[node] == rank])
        found.append([next(mine) if node in model.inside else node for node in row])
    if net.chained(found) is None or Paths(net, found).span >= paths.span - 1e-9:
        return None
    return found
