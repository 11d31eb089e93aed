"""Halves of backwards put together, one by one, where a step gets no longer: apart they take more time than whole.

The local search moves halves and does not know what they cost apart.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

from deepspeed_pulse.ir.schedule import Action, Op, Schedule
from deepspeed_pulse.planner.schedules.halves import whole_at

_PATIENCE = 8
"""Climbs without a better order after which no other begins. Each puts halves together in another order: the best of
six was up to 1.4 % of a step ahead of the worst."""

_EQUAL = 1e-9
"""Of a step, by how much one may be longer: what is as long may lead to one that is shorter."""


def put_together(
    starts: Sequence[Schedule], step_ms: Callable[[Schedule], float], *, seed: int, deadline: float
) -> Schedule:
    """The order with the shortest step, ms, that climbs from the starts reach: halves as they run, then at random.

    ``deadline``: in this process's processor time, s; the best so far is returned then.
    """
    rng = random.Random(seed)
    best, best_ms = starts[0], step_ms(starts[0])
    climb = idle = 0
    while idle < _PATIENCE and time.process_time() < deadline:
        found = starts[climb % len(starts)]
        found_ms, before = step_ms(found), math.inf
        while found_ms < before * (1 - _EQUAL):
            before = found_ms
            halves = [action for row in found for action in row if action.op is Op.INPUT_GRAD]
            if climb >= len(starts):
                rng.shuffle(halves)
            for half in halves:
                if time.process_time() >= deadline:
                    break
                found, found_ms = _least(found, found_ms, half, step_ms)
        better = found_ms < best_ms * (1 - _EQUAL)
        best, best_ms = (found, found_ms) if better else (best, best_ms)
        climb, idle = climb + 1, 0 if better else idle + 1
    return best


def _least(
    schedule: Schedule, before_ms: float, half: Action, step_ms: Callable[[Schedule], float]
) -> tuple[Schedule, float]:
    """With a half's backward whole, if the step is no longer then."""
    other = whole_at(schedule, half)
    other_ms = step_ms(other)
    return (other, min(other_ms, before_ms)) if other_ms <= before_ms * (1 + _EQUAL) else (schedule, before_ms)
