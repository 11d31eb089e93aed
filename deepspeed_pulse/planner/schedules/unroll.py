"""A steady-state pattern: an order for few microbatches becomes one for many.

In the middle of a good order every rank repeats itself: a window holds each stage and op equally often. Repeating the
windows of all ranks that start at one time, with later microbatches, and shifting what follows, gives an order that
costs one period a microbatch more. Windows that do not fit together show as a deadlock or a long makespan.
"""

from __future__ import annotations

from collections import Counter

from deepspeed_pulse.ir.schedule import Action, Schedule

_PERIODS = (1, 2, 3, 4)
_CUTS = 12


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
    """The row with its first window from ``time`` on repeated; empty when no window is a whole number of periods."""
    columns = {(a.stage, a.op) for a in row}
    length, known = periods * len(columns), len(row) // len(columns)
    earliest = sum(starts[a] < time for a in row)
    for first in range(earliest, min(earliest + length, len(row) - length + 1)):
        window = row[first : first + length]
        counts = Counter((a.stage, a.op) for a in window)
        if all(counts[column] == periods for column in columns):
            break
    else:
        return []
    repeats = -(-(microbatches - known) // periods)
    longer = list(row[: first + len(window)])
    for number in range(1, repeats + 1):
        longer += [_later(a, number * periods) for a in window]
    longer += [_later(a, repeats * periods) for a in row[first + len(window) :]]
    return [a for a in longer if a.microbatch < microbatches]


def _later(action: Action, microbatches: int) -> Action:
    return Action(action.stage, action.op, action.microbatch + microbatches)
