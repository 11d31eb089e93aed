"""Backwards in halves in an order: every one taken apart for a search, and put together where that costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed_pulse.ir.keys import local_dependents
from deepspeed_pulse.ir.schedule import Action, Op, Schedule
from deepspeed_pulse.planner.problem import Problem

_ROUNDING = 1e-9


def halves_cost(problem: Problem) -> bool:
    """Apart they take longer than whole, by more than rounding."""
    costs = problem.costs
    halves = zip(costs.input_grad_ms, costs.weight_grad_ms, strict=True)
    return any(i + w > whole * (1 + _ROUNDING) for (i, w), whole in zip(halves, costs.backward_ms, strict=True))


def in_halves(schedule: Schedule) -> Schedule:
    """Every ``B`` as ``I`` and ``W``, one right after the other."""
    return tuple(
        tuple(
            Action(action.stage, op, action.microbatch)
            for action in row
            for op in ((Op.INPUT_GRAD, Op.WEIGHT_GRAD) if action.op is Op.BACKWARD else (action.op,))
        )
        for row in schedule
    )


def joined(problem: Problem, schedule: Schedule) -> Schedule:
    """``B`` where halves bring nothing: where nobody waits for ``I``, and where ``W`` has nothing to do."""
    late = {stage for stage in range(problem.num_stages) if not _awaited(problem, stage)}
    early = {stage for stage, ms in enumerate(problem.costs.weight_grad_ms) if not ms} - late
    return tuple(tuple(_with_whole(row, late, early)) for row in schedule)


def without_gaps(schedule: Schedule) -> Schedule:
    """``B`` where ``W`` follows right behind its ``I``."""
    return tuple(tuple(_closed(row)) for row in schedule)


def _awaited(problem: Problem, stage: int) -> bool:
    action = Action(stage, Op.INPUT_GRAD, 0)
    others = [a for a in local_dependents(action, problem.placement, split=True) if a.stage != stage]
    return bool(others or problem.step(action).sends)


def _with_whole(row: Sequence[Action], late: set[int], early: set[int]) -> Iterator[Action]:
    """Backwards of a stage that is ``late`` stay in order: one that is whole already may be before halves' ``W``."""
    ordered = {
        s: iter(sorted(a.microbatch for a in row if a.stage == s and a.op in (Op.BACKWARD, Op.INPUT_GRAD)))
        for s in late
    }
    whole = {Op.WEIGHT_GRAD: late, Op.BACKWARD: late, Op.INPUT_GRAD: early}
    gone = {Op.INPUT_GRAD: late, Op.WEIGHT_GRAD: early}
    for action in row:
        stage = action.stage
        if stage in whole.get(action.op, ()):
            yield Action(stage, Op.BACKWARD, next(ordered[stage]) if stage in late else action.microbatch)
        elif stage not in gone.get(action.op, ()):
            yield action


def _closed(row: Sequence[Action]) -> Iterator[Action]:
    following = iter([*row[1:], None])
    skip = False
    for action in row:
        after = next(following)
        if skip:
            skip = False
        elif action.op is Op.INPUT_GRAD and after == Action(action.stage, Op.WEIGHT_GRAD, action.microbatch):
            yield Action(action.stage, Op.BACKWARD, action.microbatch)
            skip = True
        else:
            yield action
