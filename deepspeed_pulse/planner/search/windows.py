"""HiGHS on windows of a good order: what runs in a span of time is ordered anew, all else stays.

What starts before the window keeps its times, what starts after it keeps its order, so that all paths from the window
to the end are known lengths. The stash limits of a rank are rows too, which the local search can only test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed_pulse.planner.search.net import Net, Rows
from deepspeed_pulse.planner.search.order_model import OrderModel, Row
from deepspeed_pulse.planner.search.paths import Paths

MAX_PAIRS = 160
"""Pairs of a window, open or decided: HiGHS handles it in about a second."""

_NODES = 100
"""Branch-and-bound nodes of a window: unlike seconds, the same on every machine."""


def window_model(paths: Paths, window: Sequence[int]) -> OrderModel:
    """The model of a window of an order."""
    nodes = sorted(window, key=lambda node: paths.place[node])
    floor: dict[int, float] = {}
    rest: dict[int, float] = {}
    inside, net = set(nodes), paths.net
    for rank in range(net.problem.num_ranks):
        mine = [node for node in paths.rows[rank] if node in inside]
        for node in mine:
            before = [paths.end[other] + gap for other, gap in net.before[node] if other not in inside]
            after = [paths.reach[other] + gap for other, gap in net.after[node] if other not in inside]
            floor[node] = max([paths.end[paths.previous[mine[0]]], *before])
            rest[node] = max([paths.reach[paths.following[mine[-1]]], net.finish[node], *after])
    return OrderModel(net, nodes, floor, rest, paths.span)


def stash_rows(model: OrderModel, paths: Paths, change: Sequence[float], limits: Sequence[float]) -> Iterator[Row]:
    """For each F of a rank: what is stashed before it, and itself, within the limit."""
    known, inside = set(model.pairs), set(model.nodes)
    for rank, row in enumerate(paths.rows):
        mine = [node for node in row if node in inside]
        if not mine or limits[rank] == float("inf"):
            continue
        already = sum(change[node] for node in row[: paths.position[mine[0]]])
        for node in (n for n in mine if change[n] > 0):
            terms: list[tuple[object, float]] = []
            room = limits[rank] - already - change[node]
            for other in (n for n in mine if n != node and change[n]):
                weight = change[other]
                if (other, node) in known:
                    terms.append(((other, node), -weight))
                elif (node, other) in known:
                    terms.append(((node, other), weight))
                    room -= weight
                elif paths.place[other] < paths.place[node]:
                    room -= weight
            if terms:
                yield terms, -room


def windows(paths: Paths) -> list[list[int]]:
    """Spans of time, each with about as many open pairs as HiGHS handles, overlapping by half."""
    starts = sorted((node for row in paths.rows for node in row), key=lambda node: (paths.start(node), node))
    found, first = [], 0
    while first < len(starts):
        size, pairs, ranks = 0, 0, [0] * paths.net.problem.num_ranks
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
    model = window_model(paths, window)
    starts = {node: paths.start(node) for node in model.nodes}
    stash = stash_rows(model, paths, change, limits)
    values = model.program(starts, stash, random_seed=0, seconds=seconds, mip_max_nodes=_NODES).solve()
    if values is None:
        return None
    value = dict(zip(model.nodes, values, strict=False))
    order = sorted(model.nodes, key=lambda node: (value[node], paths.place[node]))
    found = []
    for rank, row in enumerate(rows):
        mine = iter([node for node in order if net.machine[node] == rank])
        found.append([next(mine) if node in value else node for node in row])
    if net.chained(found) is None or Paths(net, found).span >= paths.span - 1e-9:
        return None
    return found
