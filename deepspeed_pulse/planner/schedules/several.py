"""Orders of several backbones on the same ranks.

**mixed**: list scheduling by how early an action could run: the way to it from its microbatch's start, and a *period*
for each microbatch before. With a short period the outer ranks, where a backbone begins, feed the inner ones of both
directions first. So two equal waves in opposite directions reach W + (P/2-1)(f+b), with split backward W + (P/2-1) f
(W: work of a rank; f, b: a stage's forward and backward; f = b/2), the shortest there is, for even P and M >= P.
Longer periods finish microbatches sooner, which caps want.

**sequential**: one backbone after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from deepspeed_pulse.ir.keys import key_of
from deepspeed_pulse.ir.schedule import Action, Op, Schedule
from deepspeed_pulse.planner.bounds import Column, CriticalPaths
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.listing import Cap, Prefer, list_schedule

_MOST_TURNS = 3
"""Backbones whose orders, one after the other, are all tried."""

_PERIODS = (1.0, 4.0, 2.0, 3.0, 6.0, 18.0)
"""Tried where there are few actions, in mean forwards of a stage; else the first two."""

_LEADS = (0.0, 3.0, -6.0)
"""How much earlier backwards count, in the same unit; only the first where nothing caps."""

_MANY_FORWARDS = 1500
"""Above so many, fewer orders are tried: planning stays within seconds."""


def mixed_orders(problem: Problem, caps: Sequence[Cap | None], split: bool) -> Iterator[Callable[[], Schedule]]:
    """One for each cap, period and lead."""
    head_ms = CriticalPaths(problem, split=split).head_ms
    unit_ms = sum(problem.costs.forward_ms) / problem.num_stages
    few = problem.num_stages * problem.plan.microbatches <= _MANY_FORWARDS
    for cap in caps:
        leads = _LEADS if cap and few else _LEADS[:1]
        for period, lead in itertools.product(_PERIODS if few else _PERIODS[:2], leads):
            rank_by = partial(_earliest, head_ms, period * unit_ms, lead * unit_ms)
            yield partial(list_schedule, problem, problem.plan.microbatches, cap=cap, split=split, prefer=rank_by)


def _earliest(
    head_ms: Mapping[Column, float], period_ms: float, lead_ms: float, action: Action
) -> tuple[bool, float, int, int]:
    """What comes first: ``W`` last, then by the time; the earlier microbatch among equals."""
    stage, kind, _ = key_of(action)
    way_ms = head_ms[stage, kind] - (lead_ms if action.op in (Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD) else 0.0)
    time_ms = way_ms + period_ms * action.microbatch
    return action.op is Op.WEIGHT_GRAD, time_ms, action.microbatch, stage


def sequential_orders(problem: Problem, caps: Sequence[Cap | None], split: bool) -> Iterator[Callable[[], Schedule]]:
    """Each rank's work of one backbone after the other, in every order of up to three; each alone has all the room."""
    parts = range(len(problem.plan.backbones))
    alone = [_alone(problem, index) for index in parts]
    turns = list(itertools.permutations(parts)) if len(parts) <= _MOST_TURNS else [tuple(parts), tuple(reversed(parts))]
    for cap in caps:
        for prefer in (Prefer.BACKWARD, Prefer.FORWARD, *([] if cap else [Prefer.FIRST_HOME])):
            listed = cache(partial(_listed_alone, alone, prefer, cap, split))
            for turn in turns:
                yield partial(_one_by_one, listed, turn)


def _alone(problem: Problem, index: int) -> tuple[Problem, int]:
    """One backbone with its part of the plan, and the number of its first stage."""
    plan, (first, end) = problem.plan, problem.plan.backbones[index].stages
    start = plan.boundaries[first]
    inside = [route for route in plan.routes if first <= route.source_stage < end]
    own = replace(
        plan,
        boundaries=tuple(cut - start for cut in plan.boundaries[first : end + 1]),
        placement=plan.placement.parts[index],
        backbones=(),
        conditioning=(),  # extra forwards find their place in the whole order
        routes=tuple(
            replace(r, source_stage=r.source_stage - first, hops=tuple((a - first, b - first) for a, b in r.hops))
            for r in inside
        ),
        recompute=tuple(i - start for i in plan.recompute if start <= i < plan.boundaries[end]),
    )
    return Problem(own, problem.profile.part(index), problem.cluster), first


def _listed_alone(
    alone: Sequence[tuple[Problem, int]], prefer: Prefer, cap: Cap | None, split: bool, index: int
) -> Schedule:
    """One backbone's order, by the numbers that its stages have beside others."""
    problem, first = alone[index]
    if cap is not None:
        cap = replace(cap, weights=cap.weights[first : first + problem.num_stages])
    rows = list_schedule(problem, problem.plan.microbatches, prefer=prefer, cap=cap, split=split)
    return tuple(tuple(action._replace(stage=action.stage + first) for action in row) for row in rows)


def _one_by_one(listed: Callable[[int], Schedule], turn: Sequence[int]) -> Schedule:
    rows = zip(*map(listed, turn), strict=True)
    return tuple(tuple(itertools.chain.from_iterable(parts)) for parts in rows)
