"""An order under local search: longest paths to and from every node, kept up to date from move to move."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepspeed_pulse.planner.search.net import Arc, Net, Rows


@dataclass(frozen=True, slots=True)
class Move:
    """Of a rank's row: the node at ``source`` goes to ``target``, those between shift by one."""

    rank: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of a rank's row: a backward makes room for its halves, or they for it.

    ``nodes`` then stand where ``first`` to ``last`` were; ``gone`` no longer stands there, ``come`` newly does.
    """

    rank: int
    first: int
    last: int
    nodes: tuple[int, ...]
    gone: tuple[int, ...]
    come: tuple[int, ...]


class Paths:
    """Rows with ``end`` (longest path up to and with a node) and ``reach`` (from a node, itself included), ms.

    Both lists have a zero after their last node, which is what index -1, "no neighbour", finds. Nodes that the rows
    lack have minus infinity in both, and position -1.
    """

    def __init__(self, net: Net, rows: Rows) -> None:
        self.net = net
        self.rows = [row[:] for row in rows]
        found = net.chained(self.rows)
        assert found is not None, "the order deadlocks"
        self._load(*found)

    def _load(self, order: list[int], previous: list[int], following: list[int]) -> None:
        self.order, self.previous, self.following = order, previous, following
        size = len(self.net.duration)
        self.place, self.position = [0] * size, [-1] * size
        for at, node in enumerate(order):
            self.place[node] = at
        for row in self.rows:
            for at, node in enumerate(row):
                self.position[node] = at
        self.end, self.reach = [-math.inf] * size + [0.0], [-math.inf] * size + [0.0]
        self._forward(0)
        self._backward(len(order))

    def _forward(self, low: int) -> None:
        end, previous, before, duration = self.end, self.previous, self.net.before, self.net.duration
        for node in self.order[low:] if low else self.order:
            time = end[previous[node]]
            for other, gap in before[node]:
                if end[other] + gap > time:
                    time = end[other] + gap
            end[node] = time + duration[node]

    def _backward(self, high: int) -> None:
        reach, following, after, duration = self.reach, self.following, self.net.after, self.net.duration
        finish = self.net.finish
        for node in self.order[high - 1 :: -1]:
            time = reach[following[node]]
            if finish[node] > time:
                time = finish[node]
            for other, gap in after[node]:
                if reach[other] + gap > time:
                    time = reach[other] + gap
            reach[node] = time + duration[node]
        self.span = max([reach[row[0]] for row in self.rows if row])

    def start(self, node: int) -> float:
        return self.end[node] - self.net.duration[node]

    def move(self, move: Move) -> bool:
        """Apply a move; False, and nothing changed, when the order would deadlock."""
        if self.net.queues:
            return self._move_and_load(move)
        row = self.rows[move.rank]
        node, other = row[move.source], row[move.target]
        low, high = sorted((self.place[node], self.place[other]))
        window = self.order[low : high + 1]
        if move.source < move.target:  # node and what depends on it after other
            kept, moved = _parted(window, node, self.net.before, self.previous, self.following[node])
            window = [*kept, *moved]
        else:  # node and what it depends on before other
            kept, moved = _parted(window[::-1], node, self.net.after, self.following, self.previous[node])
            window = [*kept, *moved][::-1]
        if other in moved:
            return False
        self.order[low : high + 1] = window
        for at, shifted in enumerate(window, low):
            self.place[shifted] = at
        self._shift(move)
        self._forward(low)
        self._backward(high + 1)
        return True

    def _move_and_load(self, move: Move) -> bool:
        row = self.rows[move.rank]
        row.insert(move.target, row.pop(move.source))
        found = self.net.chained(self.rows)
        if found is None:
            row.insert(move.source, row.pop(move.target))
            return False
        self._load(*found)
        return True

    def exchange(self, exchange: Exchange) -> None:
        """Apply one. It leads to no deadlock: a half's backward waits for what it waits for, and others for both."""
        row = self.rows[exchange.rank]
        row[exchange.first : exchange.last + 1] = exchange.nodes
        if self.net.queues:
            found = self.net.chained(self.rows)
            assert found is not None, "the order deadlocks"
            self._load(*found)
            return
        low, high = self._swap(exchange, row)
        for at, node in enumerate(self.order[low:], low):
            self.place[node] = at
        for node in exchange.gone:
            self.position[node] = -1
            self.end[node] = self.reach[node] = -math.inf
        self._link(row, exchange.first, len(row) - 1)
        self._forward(low)
        self._backward(high)

    def _swap(self, exchange: Exchange, row: list[int]) -> tuple[int, int]:
        """What comes for what goes in the order of all; where ends change from, and up to where what follows does."""
        low = self.place[exchange.gone[0]]
        self.order[low] = exchange.come[0]
        self.place[exchange.come[0]] = low
        if len(exchange.gone) > 1:
            high = self.place[exchange.gone[1]]
            del self.order[high]
            return low, high
        before = row[row.index(exchange.come[1]) - 1]
        high = self.place[before] + 1
        self.order.insert(high, exchange.come[1])
        return low, high + 1

    def _shift(self, move: Move) -> None:
        row = self.rows[move.rank]
        row.insert(move.target, row.pop(move.source))
        self._link(row, *sorted((move.source, move.target)))

    def _link(self, row: list[int], low: int, high: int) -> None:
        """Tell the nodes at ``low`` to ``high`` and those beside them where they stand now."""
        last = row[low - 1] if low else -1
        for at in range(low, high + 1):
            node = row[at]
            self.position[node] = at
            self.previous[node] = last
            if last >= 0:
                self.following[last] = node
            last = node
        beyond = row[high + 1] if high + 1 < len(row) else -1
        self.following[last] = beyond
        if beyond >= 0:
            self.previous[beyond] = last


def _parted(
    window: list[int], node: int, arcs: list[list[Arc]], neighbours: list[int], skipped: int
) -> tuple[list[int], dict[int, None]]:
    """What in the window does not hang on ``node``, and what does, both in its order.

    A node hangs on its arcs' ends and on its neighbour in the row, which ``skipped`` is about to lose.
    """
    kept: list[int] = []
    moved: dict[int, None] = {node: None}
    for other in window:
        if other == node:
            continue
        hit = other != skipped and neighbours[other] in moved
        if not hit:
            for end, _ in arcs[other]:
                if end in moved:
                    hit = True
                    break
        if hit:
            moved[other] = None
        else:
            kept.append(other)
    return kept, moved
