"""A steady-state pattern: an order for few microbatches becomes one for many.

In the middle of a good order every rank repeats itself: a window holds each stage and op equally often. Repeating the
windows of all ranks that start at one time, with later microbatches, and shifting what follows, gives an order that
costs one period a microbatch more. Windows that do not fit together show as a deadlock or a long makespan.
"""

from __future__ import annotations

from collections import Counter

from deepspeed_pulse.ir.schedule import Action, Op, Schedule

_PERIODS = (1, 2, 3, 4)
_CUTS = 12

Column = tuple[int, Op]
"""A stage, and a forward or a half of a backward."""


def unrolled(order: Schedule, starts: dict[Action, float], microbatches: int) -> list[Schedule]:
    """Candidates for ``microbatches`` from an order for fewer with its simulated starts; none where nothing repeats."""
    times = sorted(starts.values())
    found = []
    for periods in _PERIODS:
        for cut in range(1, _CUTS):
            time = times[len(times) * cut // _CUTS]
            rows = [_repeated(row, starts, time, periods, microbatches) for row in order]
            if all(rows):
                found.append(tuple(tuple(row) for row in rows))
    return list(dict.fromkeys(found))


def _repeated(
    row: tuple[Action, ...], starts: dict[Action, float], time: float, periods: int, microbatches: int
) -> list[Action]:
    """The row with its first window from ``time`` on repeated; empty when no window is a whole number of periods.

    Also where what it has whole and in halves does not repeat: some would be missing then.
    """
    columns = {column for a in row for column in _columns(a)}
    known = sum(len(_columns(a)) for a in row) // len(columns)
    earliest = sum(starts[a] < time for a in row)
    found = _window(row, earliest, columns, periods)
    if found is None:
        return []
    first, last = found
    repeats = -(-(microbatches - known) // periods)
    longer = list(row[:last])
    for number in range(1, repeats + 1):
        longer += [_later(a, number * periods) for a in row[first:last]]
    longer += [_later(a, repeats * periods) for a in row[last:]]
    longer = [a for a in longer if a.microbatch < microbatches]
    parts = [(column, a.microbatch) for a in longer for column in _columns(a)]
    return longer if len(parts) == len(set(parts)) == len(columns) * microbatches else []


def _window(row: tuple[Action, ...], earliest: int, columns: set[Column], periods: int) -> tuple[int, int] | None:
    """Where the first window begins and ends that has every column so often; looked for as far as one may be long."""
    size, longest = periods * len(columns), periods * len({(a.stage, a.op) for a in row})
    for first in range(earliest, min(earliest + longest, len(row))):
        counts: Counter[Column] = Counter()
        last, found = first, 0
        while last < len(row) and found < size:
            counts.update(_columns(row[last]))
            found += len(_columns(row[last]))
            last += 1
        if found < size:
            return None
        if all(counts[column] == periods for column in columns):
            return first, last
    return None


def _columns(action: Action) -> list[Column]:
    """A whole backward is both halves, so that an order may have some of a stage's whole."""
    ops = (Op.INPUT_GRAD, Op.WEIGHT_GRAD) if action.op is Op.BACKWARD else (action.op,)
    return [(action.stage, op) for op in ops]


def _later(action: Action, microbatches: int) -> Action:
    return Action(action.stage, action.op, action.microbatch + microbatches)
