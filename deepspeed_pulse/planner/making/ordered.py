"""The best order of a plan's cuts, with the job's frozen work in the time that leaves idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.carried import with_carried
from deepspeed_pulse.ir.conditioning import SelfConditioned, placed
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.planner.filling.fill import fill_plan
from deepspeed_pulse.planner.job import DEFAULTS, Job, Progress, SearchOptions
from deepspeed_pulse.planner.making.rolled import with_own_steps
from deepspeed_pulse.planner.schedules.heuristics import halves_tried
from deepspeed_pulse.planner.search.synthesize import synthesize
from deepspeed_pulse.planner.simulator import step_ms

_SEARCHED = 2
"""Choices of microbatches that run an extra forward, how many are searched for better orders."""


def ordered(plan: Plan, job: Job, options: SearchOptions = DEFAULTS, progress: Progress | None = None) -> Plan:
    """The plan with the best order and fill found; its own schedule and fill are not looked at.

    ``options.solver_seconds`` are for the order; filling takes half as many in addition.

    Raises:
        ConfigError: the schedule is not available or does not fit the placement; lists those that do.
        InfeasibleError: no order fits the memory, or no rank has room for a part; says how much would be needed.
    """
    plan = with_carried(replace(plan, fill=None), ())
    order = _conditioned if plan.conditioning else _ordered
    return with_own_steps(order(plan, job, options, progress), job, options)


def _conditioned(plan: Plan, job: Job, options: SearchOptions, progress: Progress | None) -> Plan:
    """Of the choices of microbatches that run an extra forward, what is best: by known orders, then by a search."""
    choices = {placed(plan.conditioning, order): None for order in _priorities(plan.microbatches, plan.conditioning)}
    quick = replace(options, solver_seconds=0.0)
    found: list[Plan] = []
    problems: list[InfeasibleError] = []
    for conditioning in choices:
        try:
            found.append(_ordered(replace(plan, conditioning=conditioning), job, quick, None))
        except InfeasibleError as problem:
            problems.append(problem)
    if not found:
        raise min(problems, key=lambda problem: problem.needed_bytes or 0)
    best = sorted(found, key=step_ms)[:_SEARCHED]
    if not options.solver_seconds or _is_proven(best[0]):
        return best[0]
    share = replace(options, solver_seconds=options.solver_seconds / len(best))
    return min((_ordered(replace(p, fill=None), job, share, progress) for p in best), key=step_ms)


def _priorities(microbatches: int, conditioning: Sequence[SelfConditioned]) -> Iterator[list[int]]:
    """Which microbatches run an extra forward, in the order in which they are taken: the last ones, spread, the first.

    The first of a step need not wait for one, and the time that ranks are idle at its start is when others run theirs.
    """
    every = list(range(microbatches))
    yield every[::-1]
    most = max(one.count(microbatches) for one in conditioning)
    spread = [(k + 1) * microbatches // most - 1 for k in range(most)]
    yield [*spread[::-1], *(m for m in every if m not in spread)]
    for ahead in sorted({(microbatches - most) * n // 4 for n in (1, 2, 3)}):
        yield [*every[ahead : ahead + most][::-1], *every[:ahead], *every[ahead + most :]]
    yield every


def _ordered(plan: Plan, job: Job, options: SearchOptions, progress: Progress | None) -> Plan:
    if not job.frozen:
        return synthesize(plan, job, options, progress)
    try:
        return _filled(plan, job, job.limit_bytes, options, progress)
    except InfeasibleError as reason:
        if reason.needed_bytes is None:
            raise
        spare = job.limit_bytes - (reason.needed_bytes - job.limit_bytes)
        if spare <= 0:
            raise
    # what both take is at most twice what was given, which is what ranks wait for
    return _filled(plan, job, spare, replace(options, solver_seconds=options.solver_seconds / 3), progress)


def _is_proven(plan: Plan) -> bool:
    """No order of its cuts has a shorter step; sums of gradients that end behind the order are not in its proof."""
    solver, figures = plan.solver, plan.estimate
    return solver is not None and solver.optimal and figures is not None and figures.hides_sums


def _filled(plan: Plan, job: Job, memory_bytes: int, options: SearchOptions, progress: Progress | None) -> Plan:
    """Ordered within that much memory, then filled: with backwards whole and in halves where both may be.

    Weight halves and frozen work want the same idle time, so what has the shorter step is known once both are filled.
    """
    kinds, within = halves_tried(options, job.profile), replace(job, memory_bytes=memory_bytes)
    seconds = options.solver_seconds / len(kinds)
    found: list[Plan] = []
    problems: list[InfeasibleError] = []
    for split in kinds:
        one = replace(options, split_backward=split, solver_seconds=seconds)
        try:
            found.append(fill_plan(synthesize(plan, within, one, progress), job, solver_seconds=seconds / 2))
        except InfeasibleError as reason:
            problems.append(reason)
    if not found:
        raise min(problems, key=lambda reason: reason.needed_bytes or 0)
    return min(found, key=step_ms)
