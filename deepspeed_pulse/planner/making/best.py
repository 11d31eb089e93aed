"""The best plan of several placements, and of what layers may run again in backward."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.planner.job import UNLIMITED_BYTES, Job
from deepspeed_pulse.planner.making.maker import WORTH_CHANGING, Maker, TooSlow
from deepspeed_pulse.planner.recompute import cheapest_first
from deepspeed_pulse.planner.simulator import estimate, step_ms, still_optimal

MOST_SEARCHED = 2
"""Of the placements of several backbones (which of them run the other way round, and how), how many are searched for
better orders: those whose known orders are fastest."""

_EQUAL = 1e-9
"""Of a step, up to which two are equally fast."""

Made = TypeVar("Made")

_SHARES = (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Of the layers worth recomputing, how many are tried in search of the fastest plan."""


def best_plan(maker: Maker, places: Sequence[Placement], rivals: Sequence[Placement] = ()) -> Plan:
    """The fastest plan; where memory binds and it may, one that recomputes layers if that is faster than other cuts.

    ``rivals``: placements that are taken where they are faster. Finding their cuts takes seconds, so they are not
    tried beside layers that are recomputed.
    """
    free = _free(maker, places) if maker.job.recompute == "auto" else []
    made = list(itertools.chain(*free))
    if maker.job.recompute != "auto" or (made and _fits(_first(made), maker.job)):
        known = [maker.quick().best(plans) for plans in free] if all(_fits(plan, maker.job) for plan in made) else []
        known = known or _each(maker.quick().plan, places)
        if rivals or len(places) > MOST_SEARCHED:
            return _with_rivals(maker, known, rivals)
        return _searched(maker, known)
    layers = cheapest_first(maker.job.profile)
    found: list[Plan] = []
    problems: list[InfeasibleError] = []
    for count in sorted({round(share * len(layers)) for share in _SHARES}):
        try:
            plan = _fastest(replace(maker.quick(), recompute=tuple(sorted(layers[:count])), moves=False), places)
        except InfeasibleError as reason:
            problems.append(reason)
        else:
            # Only what this order needs; the longest forwards are dropped first.
            longest_first = sorted(plan.recompute, key=lambda i: -maker.job.profile.layers[i].forward_ms)
            found.append(_dropped(plan, maker, longest_first))
    if not found:
        raise _joined(problems, f"{problems[0].text}; recomputing layers in backward does not help enough")
    lean = min(found, key=lambda plan: (step_ms(plan), len(plan.recompute)))
    try:
        if not lean.recompute:
            return _fastest(maker, places)
        lean = replace(maker.quick(), recompute=lean.recompute).moved(lean)
        return min(lean, maker.order(lean), key=step_ms)
    except InfeasibleError:  # the order fits by what other layers freed: keep it
        return lean


def _free(maker: Maker, places: Sequence[Placement]) -> list[list[Plan]]:
    """The plans of known orders, were there no limit of memory; none where they are too slow."""
    unlimited = replace(maker.quick(), job=replace(maker.job, memory_bytes=UNLIMITED_BYTES), moves=False)
    try:
        return _each(unlimited.plans, places)
    except TooSlow:
        return []


def _fits(plan: Plan, job: Job) -> bool:
    return max(plan.figures.peak_bytes) <= job.limit_bytes


def _dropped(plan: Plan, maker: Maker, layers: Sequence[int]) -> Plan:
    """Without those of some layers, one by one in order, that memory allows to keep; by halves, which is the same."""
    if not layers:
        return plan
    fewer = replace(plan, recompute=tuple(i for i in plan.recompute if i not in layers))
    fewer = still_optimal(replace(fewer, estimate=estimate(fewer, maker.job.profile, maker.job.cluster)))
    if _fits(fewer, maker.job):
        return fewer
    half = len(layers) // 2
    return _dropped(_dropped(plan, maker, layers[:half]), maker, layers[half:]) if half else plan


def _with_rivals(maker: Maker, known: Sequence[Plan], rivals: Sequence[Placement]) -> Plan:
    """Known orders decide which plans are searched for better ones: so many as are ``known``, of the places."""
    found = list(known)
    most = WORTH_CHANGING * min(map(step_ms, known))
    for place in rivals:
        plan = maker.rival(place, most)
        if plan is not None:
            found.append(plan)
            most = step_ms(plan)
    fastest = sorted(range(len(found)), key=lambda number: step_ms(found[number]))
    return _searched(maker, [found[number] for number in sorted(fastest[: min(len(known), MOST_SEARCHED)])])


def _searched(maker: Maker, known: Sequence[Plan]) -> Plan:
    """The best of plans of known orders, better ones searched for where that is asked for and may make one the best.

    They share the time; what one does not need is for the next.
    """
    found = list(known)
    if maker.progress is not None:
        figures = _first(known).figures
        maker.progress(figures.makespan_ms, figures.lower_bound_ms)
    until = time.process_time() + maker.options.solver_seconds
    for number, plan in enumerate(known if maker.options.solver_seconds else ()):
        left = sum(_may_win(other, found) for other in known[number:])
        if _may_win(plan, found):
            seconds = max(0.0, until - time.process_time()) / left
            found[number] = _improved(maker.within(seconds), plan)
    return _first(found)


def _may_win(plan: Plan, others: Sequence[Plan]) -> bool:
    """Whether another order of its cuts could have the shortest step.

    Not known of steps that run into one another, nor where other microbatches may run an extra forward: bounds are not
    theirs.
    """
    least_ms = plan.figures.lower_bound_ms + plan.figures.optimizer_ms
    return bool(plan.backbones or plan.conditioning) or least_ms < step_ms(_first(others)) * (1 - _EQUAL)


def _improved(maker: Maker, known: Plan) -> Plan:
    """What a search finds, or the known order, which may fit where all that keep to a cap on activations do not."""
    try:
        found = maker.order(known)
    except InfeasibleError:
        return known
    return found if step_ms(found) <= step_ms(known) else known


def _fastest(maker: Maker, places: Sequence[Placement]) -> Plan:
    """The plan with the shortest step, the first among equals; an error only when no placement is feasible."""
    return _searched(maker, _each(maker.quick().plan, places))


def _first(plans: Sequence[Plan]) -> Plan:
    """The one with the shortest step, the first among equals."""
    best = plans[0]
    for plan in plans[1:]:
        best = plan if step_ms(plan) < step_ms(best) * (1 - _EQUAL) else best
    return best


def _each(make: Callable[[Placement], Made], places: Sequence[Placement]) -> list[Made]:
    """What is made for each feasible placement; an error when there is none."""
    plans: list[Made] = []
    problems: list[InfeasibleError] = []
    for place in places:
        try:
            plans.append(make(place))
        except InfeasibleError as problem:
            problems.append(problem)
    if not plans:
        named = zip(places, problems, strict=True)
        raise _joined(problems, "\n".join(f"{place.name} placement: {problem.text}" for place, problem in named))
    return plans


def _joined(problems: Sequence[InfeasibleError], text: str) -> InfeasibleError:
    """One error for several: too slow, if any of them is."""
    slow = [problem for problem in problems if isinstance(problem, TooSlow)]
    if slow:
        return TooSlow(min(problem.bound_ms for problem in slow), any_cuts=all(problem.any_cuts for problem in slow))
    needed = [problem.needed_bytes for problem in problems if problem.needed_bytes is not None]
    more = next((problem.more for problem in problems if problem.more), None)
    return InfeasibleError(text, needed_bytes=min(needed, default=None), more=more)
