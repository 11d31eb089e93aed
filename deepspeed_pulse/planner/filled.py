"""A program with frozen work between its steps: what waits for what, and in which order it can run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed_pulse.ir.fill import Fill, FrozenWork, HandOver
from deepspeed_pulse.ir.program import Program, Step
from deepspeed_pulse.planner.order import Key, key_of, needs


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


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that cannot go on: its next item, and what is missing, as texts."""

    rank: int
    item: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} is stuck at {self.item}, which waits for {' and '.join(self.missing)}"


def results_needed(rank: int, work: FrozenWork, fill: Fill) -> tuple[Result, ...]:
    """Frozen results that a rank must hold before this work."""
    if isinstance(work, HandOver):
        return (Result(work.part, work.done, work.microbatch, rank),)
    before = [Result(work.part, work.first, work.microbatch, rank)] if work.first else []
    others = (fill.part(name) for name in fill.part(work.part).needs)
    return (*before, *(Result(part.name, len(part.layers), work.microbatch, rank) for part in others))


def given_by(rank: int, work: FrozenWork) -> Result:
    """The result that there is afterwards, on this rank or on another."""
    if isinstance(work, HandOver):
        return Result(work.part, work.done, work.microbatch, work.target_rank)
    return Result(work.part, work.end, work.microbatch, rank)


def filled_rows(program: Program, fill: Fill) -> tuple[tuple[Item, ...], ...]:
    """Per rank, steps and frozen work in order."""
    return tuple(tuple(_row(steps, rank, fill)) for rank, steps in enumerate(program))


def _row(steps: Sequence[Step], rank: int, fill: Fill) -> Iterator[Item]:
    fillings = iter(fill.rows[rank])
    following = next(fillings, None)
    for index, step in enumerate(steps):
        while following is not None and following.position <= index:
            yield following.work
            following = next(fillings, None)
        yield step
    while following is not None:
        yield following.work
        following = next(fillings, None)


def filled_order(
    program: Program, placement: Sequence[int], fill: Fill
) -> tuple[list[tuple[int, Item]], tuple[Waiting, ...]]:
    """All items in an order that respects rows and dependencies, and the ranks that cannot reach their end."""
    rows = filled_rows(program, fill)
    done: set[Key | Result] = set()
    position = [0] * len(rows)
    order: list[tuple[int, Item]] = []
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                item = row[position[rank]]
                if any(key not in done for key in _needs(rank, item, placement, fill)):
                    break
                done.add(key_of(item.action) if isinstance(item, Step) else given_by(rank, item))
                order.append((rank, item))
                position[rank] += 1
                progress = True
    return order, tuple(
        _waiting(rank, row[at], [key for key in _needs(rank, row[at], placement, fill) if key not in done])
        for rank, row in enumerate(rows)
        if (at := position[rank]) < len(row)
    )


def _needs(rank: int, item: Item, placement: Sequence[int], fill: Fill) -> Sequence[Key | Result]:
    return needs(item, placement) if isinstance(item, Step) else results_needed(rank, item, fill)


def _waiting(rank: int, item: Item, missing: Sequence[Key | Result]) -> Waiting:
    texts = tuple(str(key) if isinstance(key, Result) else "".join(map(str, key)) for key in missing)
    return Waiting(rank, str(item.action) if isinstance(item, Step) else str(item), texts)
