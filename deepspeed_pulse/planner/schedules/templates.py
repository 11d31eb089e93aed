"""Published schedules as closed forms: orders that hold for any times, because only the order is taken from them.

============  ==========  ================================================================================
name          placement   source
============  ==========  ================================================================================
interleaved   loop        Narayanan et al., arXiv 2104.04473
dualpipev     V           DeepSeek, DualPipe repository, "cut in half" variant; backward not split
zbv           V           Qi et al., arXiv 2401.10241, section 6
vhalf, vmin   V           Qi et al., arXiv 2405.15362: a building block repeated every six units
============  ==========  ================================================================================

A form that wants at least so many microbatches is made for more and cut: what is left cannot deadlock, because every
dependency is among actions of one microbatch or follows a row.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from deepspeed_pulse.ir.schedule import Action, Op, Schedule

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD  # noqa: E741


class _Row:
    """A rank's order while it is written: each stage and op counts its microbatches."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._next: dict[tuple[int, Op], int] = defaultdict(int)
        self._actions: list[Action] = []

    def add(self, times: int, *what: tuple[int, Op]) -> None:
        for _ in range(times):
            for stage, op in what:
                self._actions.append(Action(stage, op, self._next[stage, op]))
                self._next[stage, op] += 1

    def done(self) -> tuple[Action, ...]:
        return tuple(a for a in self._actions if a.microbatch < self._microbatches)


def interleaved(ranks: int, held: int, microbatches: int) -> Schedule:
    """1F1B over ``held`` stages a rank, in groups of ``ranks`` microbatches; loop placement.

    Uniform stages with M a multiple of P: bubble 3(P-1) half-stages at two stages a rank.
    """
    padded = -(-microbatches // ranks) * ranks
    groups = range(0, padded, ranks)
    order = [(chunk, m) for group in groups for chunk in range(held) for m in range(group, group + ranks)]
    rows = []
    for rank in range(ranks):
        forwards = [Action(chunk * ranks + rank, F, m) for chunk, m in order]
        backwards = [Action((held - 1 - chunk) * ranks + rank, B, m) for chunk, m in order]
        ahead = min(len(order), 2 * (ranks - rank - 1) + (held - 1) * ranks)
        row = forwards[:ahead]
        for one, other in zip(forwards[ahead:], backwards, strict=False):
            row += [one, other]
        row += backwards[len(order) - ahead :]
        rows.append(tuple(a for a in row if a.microbatch < microbatches))
    return tuple(rows)


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """The V half of DualPipe: at most 2P+1 half-stages in flight; 6M + 4P - 5 for M >= 2P."""
    rows = []
    for rank in range(ranks):
        outer, inner = rank, 2 * ranks - 1 - rank
        f0, f1, b0, b1 = (outer, F), (inner, F), (outer, B), (inner, B)
        after = ranks - rank - 1
        row = _Row(microbatches)
        row.add(2 * after, f0)
        row.add(rank + 1, f0, f1)
        row.add(after, b1, f1)
        row.add(max(microbatches, 2 * ranks) - 2 * ranks + rank + 1, f0, b1, f1, b0)
        row.add(after, b1, f1, b0)
        row.add(rank + 1, b1, b0)
        row.add(after, b0)
        rows.append(row.done())
    return tuple(rows)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: no bubble but the start's, 2P half-stages in flight: 6M + (P-1) with forward, input and weight 1 each."""
    rows = []
    padded = max(microbatches, 2 * ranks)
    for rank in range(ranks):
        outer, inner = rank, 2 * ranks - 1 - rank
        f0, f1, i0, i1, w0, w1 = (outer, F), (inner, F), (outer, I), (inner, I), (outer, W), (inner, W)
        row = _Row(microbatches)
        row.add(2 * (ranks - rank) - 1, f0)
        row.add(rank, f1, f0)
        row.add(ranks - rank, f1, i1, w1)
        steady = padded - 2 * ranks + rank + 1
        row.add(steady, f0, i0, w0, f1, i1, w1)
        row.add(ranks - rank - 1, i0, w0, f1, i1, w1)
        row.add(rank, i0, i1)
        row.add(ranks - rank, i0, w0)
        row.add(rank, w1)
        row.add(rank, w0)
        rows.append(row.done())
    return tuple(rows)


def without_weights(order: Schedule) -> Schedule:
    """Forwards and backwards only."""
    return tuple(tuple(a for a in row if a.op is not W) for row in order)


def peak_in_flight(order: Schedule) -> int:
    """Most forwards of a rank whose backward has not started."""
    return max(max(itertools.accumulate(1 if a.op is F else -1 for a in row)) for row in without_weights(order))


@dataclass(frozen=True)
class Block:
    """Offsets between neighbouring ranks of one microbatch's way: down, up, and both back again, in units."""

    down: int
    up: int
    back_down: int
    back_up: int

    def schedule(self, ranks: int, microbatches: int) -> Schedule:
        """The block repeated every six units: ``F`` and ``B`` in order of time; ``B`` stands where ``I`` goes."""
        times = self._times(ranks)
        rows = []
        for rank in range(ranks):
            every = (Action(stage, op, m) for stage, op in times[rank] for m in range(microbatches))
            rows.append(tuple(sorted(every, key=lambda a: times[rank][a.stage, a.op] + 6 * a.microbatch)))
        return tuple(rows)

    def _times(self, ranks: int) -> list[dict[tuple[int, Op], int]]:
        """The tightest turns at the ends of the V for which no rank has two actions in one unit."""
        for turns in sorted(itertools.product(range(1, 7), repeat=3), key=lambda t: (sum(t), t)):
            times = [self._rank_times(rank, ranks, *turns) for rank in range(ranks)]
            if all(len({time % 6 for time in row.values()}) == 4 for row in times):
                return times
        raise AssertionError(f"no collision-free turns for {self}")

    def _rank_times(self, rank: int, ranks: int, turn: int, head: int, back: int) -> dict[tuple[int, Op], int]:
        last = ranks - 1
        at_turn = self.down * last + turn
        at_head = at_turn + self.up * last + head
        at_back = at_head + self.back_down * last + back
        return {
            (rank, F): self.down * rank,
            (2 * ranks - 1 - rank, F): at_turn + self.up * (last - rank),
            (2 * ranks - 1 - rank, B): at_head + self.back_down * rank,
            (rank, B): at_back + self.back_up * (last - rank),
        }


V_HALF = Block(2, 1, 2, 1)
"""About half of 1F1B's activations: a microbatch's way takes 6 P units."""

V_MIN = Block(1, 1, 1, 1)
"""About a third: 4 P units, the shortest way there is."""
