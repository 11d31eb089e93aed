"""Local search among cuts: small moves, as long as a key falls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from deepspeed_pulse.planner.partition.lexicographic import Cuts

Value = TypeVar("Value", bound=Any)

Moves = Callable[[Cuts], Iterator[Cuts]]

SHIFTS = (-3, -2, -1, 1, 2, 3)


def descent(key: Callable[[Cuts], Value], cuts: Cuts, moves: Moves) -> tuple[Value, Cuts, int]:
    """Takes any move that lowers the key; its value, the cuts there, and how many cuts it looked at."""
    best, evaluations, untried = key(cuts), 0, moves(cuts)
    while moved := next(untried, None):
        evaluations += 1
        if (value := key(moved)) < best:
            cuts, best, untried = moved, value, moves(moved)
    return best, cuts, evaluations


def mirrored(cuts: Cuts) -> Iterator[Cuts]:
    """Single cuts, and mirrored pairs of cuts, by up to three layers."""
    last = len(cuts) - 1
    for at, shift in itertools.product(range(1, last), SHIFTS):
        yield from shifted(cuts, {at: shift})
    for at, shift, other in itertools.product(range(1, (last + 1) // 2), SHIFTS, SHIFTS):
        yield from shifted(cuts, {at: shift, last - at: other})


def nearby(cuts: Cuts) -> Iterator[Cuts]:
    """Single cuts, and mirrored pairs of cuts, by a layer."""
    last = len(cuts) - 1
    for at, shift in itertools.product(range(1, last), (-1, 1)):
        yield from shifted(cuts, {at: shift})
    for at, shift in itertools.product(range(1, (last + 1) // 2), (-1, 1)):
        yield from shifted(cuts, {at: shift, last - at: -shift})


def between(cuts: Cuts) -> Iterator[Cuts]:
    """A layer more for one stage and one less for another: all cuts between them by a layer."""
    for first, end in itertools.combinations(range(1, len(cuts)), 2):
        for shift in (-1, 1):
            yield from shifted(cuts, dict.fromkeys(range(first, end), shift))


def shifted(cuts: Cuts, shifts: Mapping[int, int]) -> Iterator[Cuts]:
    """The cuts with some of them moved; nothing where a stage would be empty."""
    moved = tuple(cut + shifts.get(at, 0) for at, cut in enumerate(cuts))
    if all(a < b for a, b in itertools.pairwise(moved)):
        yield moved
