"""What waits for what in a plan, and the one walk through its rows that respects it.

An *item* of a rank's row is a compute action with its messages, layers of a frozen part, or the hand-over of what those
gave. Each gives one thing when it is over, and needs others before it starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed_pulse.errors import PlanError
from deepspeed_pulse.ir.fill import Fill, FrozenWork, HandOver
from deepspeed_pulse.ir.keys import Key, key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.program import Program, Step


@dataclass(frozen=True, slots=True)
class Result:
    """What the first ``done`` layers of a part gave for a microbatch, on a pipeline rank."""

    part: str
    done: int
    microbatch: int
    rank: int

    def __str__(self) -> str:
        return f"{self.part}[{self.done}]@{self.microbatch} on rank {self.rank}"


Item = Step | FrozenWork
Rows = tuple[tuple[Item, ...], ...]


def results_needed(rank: int, work: FrozenWork, fill: Fill) -> tuple[Result, ...]:
    """Frozen results that a rank must hold before this work."""
    if isinstance(work, HandOver):
        return (Result(work.part, work.done, work.microbatch, rank),)
    before = [Result(work.part, work.first, work.microbatch, rank)] if work.first else []
    others = (fill.part(name) for name in fill.part(work.part).needs)
    return (*before, *(Result(part.name, len(part.layers), work.microbatch, rank) for part in others))


def results_read(fill: Fill) -> set[Result]:
    """Everything that some frozen work must find on its rank."""
    rows = enumerate(fill.rows)
    return {result for rank, row in rows for filling in row for result in results_needed(rank, filling.work, fill)}


def result_of(rank: int, work: FrozenWork) -> Result:
    """What there is afterwards, on this rank or on another."""
    if isinstance(work, HandOver):
        return Result(work.part, work.done, work.microbatch, work.target_rank)
    return Result(work.part, work.end, work.microbatch, rank)


def rows_of(program: Program, fill: Fill | None) -> Rows:
    """Per rank, steps and frozen work in order."""
    if fill is None:
        return program
    return tuple(tuple(_row(steps, rank, fill)) for rank, steps in enumerate(program))


def _row(steps: Sequence[Step], rank: int, fill: Fill) -> Iterator[Item]:
    fillings = deque(fill.rows[rank])
    for index, step in enumerate(steps):
        while fillings and fillings[0].position <= index:
            yield fillings.popleft().work
        yield step
    yield from (filling.work for filling in fillings)


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that cannot go on: the position of its next item, and what is missing, as texts."""

    rank: int
    item: Item
    missing: tuple[str, ...]

    def __str__(self) -> str:
        """``rank 1 is stuck at 1B0, which waits for 2B0 of rank 2``."""
        item = self.item.action if isinstance(self.item, Step) else self.item
        return f"rank {self.rank} is stuck at {item}, which waits for {' and '.join(self.missing)}"


def walk(
    program: Program, placement: Placement, fill: Fill | None = None
) -> tuple[list[tuple[int, Item]], tuple[Stuck, ...]]:
    """All items in an order that respects rows and dependencies, and the ranks that cannot reach their end.

    The second part is empty exactly when the order does not deadlock. A rank's items come in its own order.
    """

    def wanted(rank: int, item: Item) -> Sequence[Key | Result]:
        if isinstance(item, Step):
            return item.needs
        assert fill is not None
        return results_needed(rank, item, fill)

    rows = rows_of(program, fill)
    given: set[Key | Result] = set()
    position = [0] * len(rows)
    waits: list[Sequence[Key | Result] | None] = [None] * len(rows)
    """What each rank's next item needs, once it is known."""
    order: list[tuple[int, Item]] = []
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                item, needed = row[position[rank]], waits[rank]
                if needed is None:
                    needed = waits[rank] = wanted(rank, item)
                if not given.issuperset(needed):
                    break
                waits[rank] = None
                given.add(key_of(item.action) if isinstance(item, Step) else result_of(rank, item))
                order.append((rank, item))
                position[rank] += 1
                progress = True
    return order, tuple(
        Stuck(rank, row[at], tuple(_text(k, placement) for k in wanted(rank, row[at]) if k not in given))
        for rank, row in enumerate(rows)
        if (at := position[rank]) < len(row)
    )


def _text(missing: Key | Result, placement: Placement) -> str:
    if isinstance(missing, Result):
        return str(missing)
    stage = missing[0]
    return "".join(map(str, missing)) + (f" of rank {placement[stage]}" if stage < len(placement) else "")


def ordered(program: Program, placement: Placement, fill: Fill | None = None) -> list[tuple[int, Item]]:
    """The walk of a program that reaches every end; the PlanError of a deadlock says where each rank is stuck."""
    order, stuck = walk(program, placement, fill)
    if stuck:
        raise PlanError("the order of actions deadlocks; reorder the schedule:\n  " + "\n  ".join(map(str, stuck)))
    return order
