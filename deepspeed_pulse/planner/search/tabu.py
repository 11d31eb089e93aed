"""Local search on rank orders: tabu search with insert moves along the critical path.

Blocks, insert moves and their estimates after Balas and Vazacopoulos (1998) and Nowicki and Smutnicki (1996), with
two differences: microbatches of a stage keep their order, and a rank's stash must stay within its limit.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from deepspeed_pulse.ir.schedule import FORWARDS, Action, Op
from deepspeed_pulse.planner.schedules.listing import Cap
from deepspeed_pulse.planner.search.net import Net, Rows
from deepspeed_pulse.planner.search.paths import Exchange, Move, Paths

_EPSILON = 1e-9

_EXCHANGES = 8
"""Backwards that a step tries to make whole or to take apart: an estimate spans all from one half to the other."""


class Search:
    """A tabu search that keeps its state between calls of :meth:`run`."""

    def __init__(self, net: Net, cap: Cap | None, rows: Rows, *, seed: int, target_ms: float) -> None:
        self.net, self.target_ms = net, target_ms
        self.random = random.Random(seed)
        sign = {Op.FORWARD: 1.0, Op.BACKWARD: -1.0, Op.WEIGHT_GRAD: -1.0}
        self.change = [sign.get(a.op, 0.0) * cap.weights[a.stage] if cap else 0.0 for a in net.actions]
        """What a node adds to its rank's stash (at its start) or takes from it (at its end)."""
        self.limits = list(cap.limits) if cap else [float("inf")] * net.problem.num_ranks
        self.capped = cap is not None
        self.step = 0
        self.tabu: dict[tuple[int, int], int] = {}
        self.restart(rows)
        self.best_rows, self.best_ms = [row[:] for row in rows], self.paths.span

    def restart(self, rows: Rows) -> None:
        self.paths = Paths(self.net, rows)
        self.rows = self.paths.rows
        self.tabu.clear()
        self.since = 0

    def run(self, steps: int, deadline: float) -> bool:
        """Whether a better order was found."""
        before = self.best_ms
        for _ in range(steps):
            if self.best_ms <= self.target_ms * (1 + _EPSILON) or time.process_time() > deadline:
                break
            self.step += 1
            if not self._advance():
                self._shake(6)
            self.since += 1
            if self.paths.span < self.best_ms - _EPSILON:
                self.best_ms, self.best_rows, self.since = self.paths.span, [row[:] for row in self.rows], 0
            elif self.since > 400 + self.net.num_actions:
                self.restart(self.best_rows)
                self._shake(self.random.randint(4, 20))
        return self.best_ms < before - _EPSILON

    def adopt(self, rows: Rows) -> None:
        """Go on from a better order that was found elsewhere."""
        self.restart(rows)
        self.best_rows, self.best_ms = rows, self.paths.span

    def reject(self, rows: Rows, best_ms: float, share: float) -> None:
        """Go back to an earlier best order, and from now on less stash for every rank."""
        self.limits = [share * limit for limit in self.limits]
        self.best_rows, self.best_ms = rows, best_ms
        self.restart(rows)

    def _advance(self) -> bool:
        """The best move that is not tabu and leads to no deadlock."""
        found = [(self._estimate(move), self.random.random(), move) for move in self._moves()]
        found.sort(key=lambda entry: (entry[0], entry[1]))
        fallback = None
        for estimate, _, move in found:
            if self._is_tabu(move) and estimate >= self.best_ms - _EPSILON:
                fallback = fallback or move
                continue
            if self._apply(move):
                return True
        return fallback is not None and self.random.random() < 0.5 and self._apply(fallback)

    def _blocks(self) -> list[tuple[int, int, int]]:
        """(rank, first, last) positions of the blocks of one critical path; a block may be one node."""
        paths, duration, after = self.paths, self.net.duration, self.net.after
        end, reach, following, critical = paths.end, paths.reach, paths.following, paths.span - _EPSILON
        node = self.random.choice([row[0] for row in self.rows if row and reach[row[0]] >= critical])
        path = [node]
        while True:
            here = end[node]
            choices = []
            other = following[node]
            if other >= 0 and here + reach[other] >= critical and end[other] - duration[other] - here <= _EPSILON:
                choices.append(other)
            for other, gap in after[node]:
                late = end[other] - duration[other] - here - gap <= _EPSILON
                if late and here + gap + reach[other] >= critical and other not in choices:
                    choices.append(other)
            if not choices:
                return self._runs(path)
            node = choices[0] if len(choices) == 1 else self.random.choice(choices)
            path.append(node)

    def _runs(self, path: list[int]) -> list[tuple[int, int, int]]:
        blocks, machine, position = [], self.net.machine, self.paths.position
        first = 0
        for at in range(1, len(path) + 1):
            if at == len(path) or machine[path[at]] != machine[path[first]]:
                if position[path[first]] >= 0:
                    blocks.append((machine[path[first]], position[path[first]], position[path[at - 1]]))
                first = at
        return blocks

    def _moves(self) -> list[Move | Exchange]:
        """Inserts of block members right after the block's last or before its first, and swaps at its ends.

        And exchanges of some of its backwards and halves, where both may be.
        """
        moves: list[Move | Exchange] = []
        blocks = self._blocks()
        for rank, first, last in blocks:
            if first == last:
                continue
            wanted = {(first, first + 1), (last, last - 1)}
            wanted |= {(at, last) for at in range(max(first, last - 12), last)}
            wanted |= {(at, first) for at in range(first + 1, min(last, first + 12) + 1)}
            wanted |= {(first, at) for at in range(first + 1, min(last, first + 6))}
            wanted |= {(last, at) for at in range(max(first, last - 6) + 1, last)}
            moves += [Move(rank, a, b) for a, b in sorted(wanted) if self._allowed(rank, a, b)]
        if self.net.both:
            moves += self._exchanges(blocks)
        return moves

    def _exchanges(self, blocks: list[tuple[int, int, int]]) -> list[Exchange]:
        actions, rows = self.net.actions, self.rows
        found = {
            (rank, actions[rows[rank][at]]._replace(op=Op.BACKWARD))
            for rank, first, last in blocks
            for at in range(first, last + 1)
            if actions[rows[rank][at]].op not in FORWARDS
        }
        drawn = self.random.sample(sorted(found, key=str), min(_EXCHANGES, len(found)))
        exchanges = [self._exchange(rank, whole) for rank, whole in drawn]
        return [one for one in exchanges if not self.capped or self._is_held(one)]

    def _is_held(self, exchange: Exchange) -> bool:
        """Halves may keep a stash for longer, where those of earlier microbatches come first."""
        later = len(exchange.come) > 1 and exchange.last > exchange.first
        return not later or self._within_limit(exchange.rank, exchange.first, exchange.nodes)

    def _exchange(self, rank: int, whole: Action) -> Exchange:
        """Halves for a backward that is whole, or else the other way."""
        index, position, row = self.net.index, self.paths.position, self.rows[rank]
        node, early, late = (index[whole._replace(op=op)] for op in (Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD))
        at = position[node]
        if at < 0:
            first, last = position[early], position[late]
            return Exchange(rank, first, last, (node, *row[first + 1 : last]), (early, late), (node,))
        before = [position[late - back] for back in range(1, whole.microbatch + 1)]  # they stay in order
        last = max([at, *before])
        return Exchange(rank, at, last, (early, *row[at + 1 : last + 1], late), (node,), (early, late))

    def _allowed(self, rank: int, source: int, target: int) -> bool:
        """Column order, no cycle, and the stash within its limit."""
        row, column = self.rows[rank], self.net.column
        low, high = min(source, target), max(source, target)
        node, mine = row[source], column[row[source]]
        for at in range(low, high + 1):
            if at != source and column[row[at]] == mine:
                return False
        end, reach, other = self.paths.end, self.paths.reach, row[target]
        if source < target:
            limit = reach[other] + _EPSILON
            if any(gap + reach[following] > limit for following, gap in self.net.after[node]):
                return False
        else:
            limit = end[other] + _EPSILON
            if any(end[earlier] + gap > limit for earlier, gap in self.net.before[node]):
                return False
        return not self.capped or self._fits(rank, source, target)

    def _fits(self, rank: int, source: int, target: int) -> bool:
        row = self.rows[rank]
        node = row[source]
        if (self.change[node] >= 0.0) == (source < target):
            return True
        low, high = min(source, target), max(source, target)
        segment = [n for n in row[low : high + 1] if n != node]
        segment.insert(target - low, node)
        return self._within_limit(rank, low, segment)

    def _within_limit(self, rank: int, low: int, segment: Sequence[int]) -> bool:
        """The stash, while these run from a position on."""
        change, limit = self.change, self.limits[rank]
        live = sum([change[n] for n in self.rows[rank][:low]])
        for n in segment:
            live += change[n]
            if live > limit:
                return False
        return True

    def _estimate(self, move: Move | Exchange) -> float:
        """Longest path through the nodes that shift, with what comes before and after the others as it is."""
        net, end, reach, row = self.net, self.paths.end, self.paths.reach, self.rows[move.rank]
        ends: dict[int, float] = {}
        reaches: dict[int, float] = {}
        if isinstance(move, Exchange):
            low, high, segment = move.first, move.last, list(move.nodes)
            ends, reaches = dict.fromkeys(move.gone, -math.inf), dict.fromkeys(move.gone, -math.inf)
            reaches |= self._messages_from(move)
        else:
            low, high = min(move.source, move.target), max(move.source, move.target)
            segment = row[low : high + 1]
            segment.insert(move.target - low, segment.pop(move.source - low))
        time = end[row[low - 1]] if low else 0.0
        for node in segment:
            for other, gap in net.before[node]:
                arrival = ends.get(other, end[other]) + gap
                if arrival > time:
                    time = arrival
            time += net.duration[node]
            ends[node] = time
        longest, rest = 0.0, reach[row[high + 1]] if high + 1 < len(row) else 0.0
        for node in reversed(segment):
            if net.finish[node] > rest:
                rest = net.finish[node]
            for other, gap in net.after[node]:
                way = gap + reaches.get(other, reach[other])
                if way > rest:
                    rest = way
            if ends[node] + rest > longest:
                longest = ends[node] + rest
            rest += net.duration[node]
            reaches[node] = rest
        return longest

    def _messages_from(self, exchange: Exchange) -> dict[int, float]:
        """``reach`` of the messages of what comes: that of the same messages of what goes."""
        nodes, reach = self.net.message_nodes, self.paths.reach
        old, new = ([sent for node in part for sent in nodes.get(node, ())] for part in (exchange.gone, exchange.come))
        return {there: reach[here] for here, there in zip(old, new, strict=True)}

    def _is_tabu(self, move: Move | Exchange) -> bool:
        row, tabu, step = self.rows[move.rank], self.tabu, self.step
        if isinstance(move, Exchange):
            return any(tabu.get((node, node), 0) > step for node in move.come)
        node = row[move.source]
        if move.source < move.target:
            return any(tabu.get((row[at], node), 0) > step for at in range(move.source + 1, move.target + 1))
        return any(tabu.get((node, row[at]), 0) > step for at in range(move.target, move.source))

    def _apply(self, move: Move | Exchange) -> bool:
        row = self.rows[move.rank]
        if isinstance(move, Exchange):
            self.paths.exchange(move)
            self.tabu.update({(node, node): self._until(row) for node in move.gone})
            return True
        node = row[move.source]
        if not self.paths.move(move):
            return False
        until = self._until(row)
        if move.source < move.target:
            self.tabu.update({(node, row[at]): until for at in range(move.source, move.target)})
        else:
            self.tabu.update({(row[at], node): until for at in range(move.target + 1, move.source + 1)})
        return True

    def _until(self, row: list[int]) -> int:
        """The step at which what was done may be undone."""
        return self.step + self.random.randint(10, 20) + len(row) // 16

    def _shake(self, count: int) -> None:
        """Random moves of the critical path's blocks, or anywhere when there are none."""
        for _ in range(count):
            moves = self._moves() or self._anywhere()
            if moves:
                self._apply(self.random.choice(moves))

    def _anywhere(self) -> list[Move]:
        rank = self.random.randrange(len(self.rows))
        row = self.rows[rank]
        found = [Move(rank, at, at + 1) for at in range(len(row) - 1)]
        return [move for move in found if self._allowed(rank, move.source, move.target)]
