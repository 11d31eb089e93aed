"""The order of actions: generators, local search from the best of them, an exact model where it is small.

The simulator alone decides: whatever found an order, its figures come from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import zip_longest

from deepspeed_pulse.errors import InfeasibleError, PulseError
from deepspeed_pulse.ir.plan import Estimate, Plan, Solver
from deepspeed_pulse.ir.schedule import Op, Schedule
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.ir.units import gigabytes
from deepspeed_pulse.planner.bounds import lower_bound_ms
from deepspeed_pulse.planner.job import DEFAULTS, Job, Progress, SearchOptions
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.halves import halves_cost, in_halves, joined, without_gaps
from deepspeed_pulse.planner.schedules.heuristics import byte_cap, frugal_orders, generators_for, halves_tried
from deepspeed_pulse.planner.schedules.listing import Cap, list_schedule
from deepspeed_pulse.planner.schedules.templates import without_weights
from deepspeed_pulse.planner.schedules.unroll import unrolled
from deepspeed_pulse.planner.search.improve import Improver
from deepspeed_pulse.planner.search.order_model import count_pairs, solve_order
from deepspeed_pulse.planner.simulator import (
    always_held,
    rank_state_bytes,
    rank_step_bytes,
    step_and_makespan_ms,
    summarize,
    times,
    with_memory,
)

MAX_BINARIES = 300
"""Largest exact model: beyond it HiGHS does not finish in half a minute."""

_FEW = 3
"""Microbatches per rank of the problem whose order is unrolled for many: start, end and a steady state between."""

_IN_HAND = 2
"""Orders whose times are asked for again: one, and what it is with its halves joined."""

_PROVEN = 1e-9
_SOLVER_TOLERANCE = 1e-6
"""HiGHS's feasibility tolerance: its bound may be that much too low or too high."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An order with its simulated figures; every way of finding an order ends as one of these."""

    name: str
    schedule: Schedule
    timeline: Timeline
    estimate: Estimate

    @property
    def rank(self) -> tuple[float, float, int]:
        """What candidates are compared by: step time, makespan, then the fullest rank."""
        return (*_rounded(self.estimate.step_ms, self.estimate.makespan_ms), max(self.estimate.peak_bytes))


def _rounded(step_ms: float, makespan_ms: float) -> tuple[float, float]:
    """As they are compared."""
    return round(step_ms, 9), round(makespan_ms, 9)


def synthesize(plan: Plan, job: Job, options: SearchOptions = DEFAULTS, progress: Progress | None = None) -> Plan:
    """The plan with the best order found, its estimate and solver; the plan's own schedule is not looked at.

    Never worse than the best generator. The same arguments give the same plan as long as the search ends before
    ``options.solver_seconds`` (its part with few microbatches, where there are many, before half of that).

    Raises:
        ConfigError: the schedule is not available or does not fit the placement; lists those that do.
        InfeasibleError: no order fits the memory; says how much would be needed.
    """
    bare = replace(plan, schedule=((),) * plan.pipeline_ranks)
    problem = Problem(bare, job.profile, job.cluster)
    searches = options.schedule == "auto" and options.solver_seconds > 0
    pools: list[_Pool] = []
    problems: list[InfeasibleError] = []
    made = cache(_made)  # orders with backwards in halves come from whole ones, too
    for split in halves_tried(options, job.profile):
        pool = _Pool(problem, job.limit_bytes, split, progress, made)
        if pool.has_no_better(pools):
            break
        try:
            pool.generate(options.schedule, best_only=not searches)
            pools.append(pool)
        except InfeasibleError as reason:
            problems.append(reason)
    if not pools:
        raise problems[0]
    starts = _searched(pools, options) if searches else {}
    for one in pools:
        if one.split:
            one.offer(one.best.name, without_gaps(one.best.schedule))
    chosen = min(pools, key=lambda one: one.best.rank)
    best, start = chosen.best, starts.get(chosen.split)
    solver = Solver(
        name=best.name,
        optimal=pool.proves(best),  # by the last one's bound: no order in halves is shorter, nor a whole one
        seed=options.seed,
        generator=start.name if start else None,
        generator_step_ms=start.estimate.step_ms if start else None,
    )
    return replace(
        plan, schedule=best.schedule, estimate=best.estimate, solver=solver, profile_fingerprint=job.profile.fingerprint
    )


def _searched(pools: Sequence[_Pool], options: SearchOptions) -> dict[bool, Candidate]:
    """Look for better orders with backwards that are whole, and in halves, wherever those may be the best of all.

    They share the time; what one does not need is for the next.

    Returns:
        Of those that were looked for, by whether backwards are in halves, the order that was the best before.
    """
    starts: dict[bool, Candidate] = {}
    until = time.process_time() + options.solver_seconds
    for number, pool in enumerate(pools):
        others = [other for other in pools if other is not pool]
        if pool.proven or pool.has_no_better(others):
            continue
        left = [pool, *(one for one in pools[number + 1 :] if not one.has_no_better([pool]))]
        now = time.process_time()
        deadline = now + (until - now) / len(left)
        starts[pool.split] = pool.best
        if pool.split and halves_cost(pool.problem):  # backwards that are whole are in its search, too
            for other in others:
                pool.offer(other.best.name, other.best.schedule)
        _solve_exactly(pool, options.seed, deadline)
        _improve(pool, options.seed, deadline)
    return starts


class _Pool:
    """Orders found so far, the best first in mind, and the strongest lower bound."""

    def __init__(
        self,
        problem: Problem,
        memory_bytes: int,
        split: bool,
        progress: Progress | None = None,
        made: Callable[[Callable[[], Schedule]], Schedule] | None = None,
    ) -> None:
        self.progress = progress
        self.problem, self.memory_bytes, self.split = problem, memory_bytes, split
        self._times = lru_cache(maxsize=_IN_HAND)(partial(times, problem))
        self._made = made or _made
        self.caps = caps_within(problem, memory_bytes)
        self.bound_ms = lower_bound_ms(problem, problem.plan.microbatches, split=split)
        self.solver_bound = False
        self.fits_all = True
        self.fitting: list[Candidate] = []

    @property
    def best(self) -> Candidate:
        return min(self.fitting, key=lambda candidate: candidate.rank)

    @property
    def proven(self) -> bool:
        """No order has a shorter step."""
        return self.proves(self.best) and self.best.estimate.hides_sums

    def has_no_better(self, others: Sequence[_Pool]) -> bool:
        """No order here has a shorter step than the best of one of the others."""
        return any(other.best.estimate.summed_ms <= self.bound_ms * (1 + _PROVEN) for other in others)

    def proves(self, candidate: Candidate) -> bool:
        """No order has a shorter makespan."""
        tolerance = _SOLVER_TOLERANCE if self.solver_bound else _PROVEN
        return candidate.estimate.makespan_ms <= self.bound_ms * (1 + tolerance)

    def generate(self, schedule: str, *, best_only: bool = False) -> None:
        """Keep the generators' orders that fit. ``best_only``: the fastest of them, where any fits."""
        smallest = self._keep_fastest(schedule) if best_only else self._keep_all(schedule)
        if self.fitting:
            return
        if self.split:
            for name, order in self._orders(schedule):
                self.offer(name, without_gaps(joined(self.problem, order)))
        if not self.fitting:
            raise _too_little_memory(self.problem, self.memory_bytes, smallest)

    def _keep_all(self, schedule: str) -> int | None:
        """Until one is proven; the smallest peak."""
        smallest: int | None = None
        for name, order in self._orders(schedule):
            candidate = self._simulated(name, order)
            peak = max(candidate.estimate.peak_bytes)
            smallest = peak if smallest is None else min(smallest, peak)
            self.fits_all = self._keep(candidate) and self.fits_all
            if self.fitting and self.proven:
                break
        return smallest

    def _keep_fastest(self, schedule: str) -> int | None:
        """What is live is known last, and of few: it is most of a simulation's time. The smallest peak of those."""
        timed: list[tuple[tuple[float, float], int, str, Schedule, bool]] = []
        for number, (name, order) in enumerate(self._orders(schedule)):
            for whole in (True, False) if self.split else (False,):  # first without halves that bring nothing
                form = joined(self.problem, order) if whole else order
                step_ms, makespan_ms = self.step_ms(form)
                proven = makespan_ms <= self.bound_ms * (1 + _PROVEN)
                if proven and self._keep(self._candidate(name, form)) and self.proven:
                    return None
                timed.append((_rounded(step_ms, makespan_ms), number, name, order, whole))
        smallest: int | None = None
        kept: set[int] = set()
        for ms, number, name, order, whole in sorted(timed, key=lambda one: one[0]):
            if self.fitting and ms > self.best.rank[:2]:
                break
            if number in kept:  # its halves bring nothing
                continue
            candidate = self._candidate(name, joined(self.problem, order) if whole else order)
            peak = max(candidate.estimate.peak_bytes)
            smallest = peak if smallest is None else min(smallest, peak)
            if self._keep(candidate):
                kept.add(number)
        return smallest

    def _orders(self, schedule: str) -> Iterator[tuple[str, Schedule]]:
        """Of the generators that may be, each once."""
        found: set[Schedule] = set()
        for name, generator in generators_for(schedule, self.problem.placement, split=self.split).items():
            for make in generator.orders(self.problem, self.caps, self.split):
                try:
                    order = self._made(make)
                    order = _with_extra(self.problem, in_halves(order) if self.split else order, self.split)
                except InfeasibleError:
                    continue
                if order not in found:
                    found.add(order)
                    yield name, order

    def starts(self) -> list[Schedule]:
        """Where searches start: the best orders, and in between frugal ones, which have room to move under a cap."""
        found = [candidate.schedule for candidate in sorted(self.fitting, key=lambda found: found.rank)]
        if self.caps[0] is None or not found:
            return found
        frugal = frugal_orders(self.problem, self.caps[0], self.split)
        mixed = [order for pair in zip_longest(found, frugal) for order in pair if order is not None]
        return list(dict.fromkeys(mixed))

    def offer(self, name: str, schedule: Schedule) -> bool:
        """Keep an order that fits; whether it does."""
        try:
            candidate = self._simulated(name, schedule)
        except PulseError:  # rounding of a solver's starts can part an order from its precedence
            return False
        return self._keep(candidate)

    def _simulated(self, name: str, schedule: Schedule) -> Candidate:
        """Without halves that bring nothing, unless apart they are faster, or else do not fit.

        A gradient may wait longer for a whole backward, and gaps may be too short for one.
        """
        if not self.split:
            return self._candidate(name, schedule)
        found = self._candidate(name, joined(self.problem, schedule))
        fits = self._fits(found)
        if fits and _rounded(*self.step_ms(schedule)) >= found.rank[:2]:
            return found
        halves = self._candidate(name, schedule)
        return found if fits and not self._fits(halves) else halves

    def step_ms(self, schedule: Schedule) -> tuple[float, float]:
        """And its makespan."""
        return step_and_makespan_ms(self.problem, self._times(schedule))

    def _candidate(self, name: str, schedule: Schedule) -> Candidate:
        timeline = with_memory(self.problem, self._times(schedule))
        estimate = summarize(self.problem, timeline)
        return Candidate(name=name, schedule=schedule, timeline=timeline, estimate=estimate)

    def _fits(self, candidate: Candidate) -> bool:
        return max(candidate.estimate.peak_bytes) <= self.memory_bytes

    def _keep(self, candidate: Candidate) -> bool:
        if not self._fits(candidate):
            return False
        self.fitting.append(candidate)
        if self.progress is not None:
            self.progress(self.best.estimate.makespan_ms, self.bound_ms)
        return True


def _improve(pool: _Pool, seed: int, deadline: float) -> None:
    """Local search from the best orders, and from what a search with fewer microbatches found."""
    now = time.process_time()
    if pool.proven or now >= deadline:
        return
    improver = _improver(pool, seed, deadline)
    few = _FEW * pool.problem.num_ranks
    if pool.problem.plan.microbatches > 2 * few and not pool.problem.plan.conditioning:
        longer = improver.shortest(_from_few(pool, few, seed, now + (deadline - now) / 2))
        if longer is not None:
            pool.offer("search", longer)
    improver.improve(pool.starts())


def _improver(pool: _Pool, seed: int, deadline: float) -> Improver:
    return Improver(
        problem=pool.problem,
        split=pool.split,
        cap=pool.caps[0],
        target_ms=pool.bound_ms,
        seed=seed,
        deadline=deadline,
        keep=lambda schedule: pool.offer("search", schedule),
    )


def _from_few(pool: _Pool, microbatches: int, seed: int, deadline: float) -> list[Schedule]:
    """Orders unrolled from the best one found for few microbatches."""
    problem = pool.problem
    few = problem.with_plan(replace(problem.plan, microbatches=microbatches))
    small = _Pool(few, pool.memory_bytes, pool.split)
    small.generate("auto")
    if not small.proven:
        _improver(small, seed, deadline).improve(small.starts())
    starts = {span.work: span.start_ms for span in small.best.timeline.spans}
    return unrolled(small.best.schedule, starts, problem.plan.microbatches)


def _solve_exactly(pool: _Pool, seed: int, deadline: float) -> None:
    """HiGHS where the model is small enough; it knows nothing of memory and of split backward."""
    problem, best = pool.problem, pool.best
    small = count_pairs(problem, problem.plan.microbatches) <= MAX_BINARIES
    if pool.split or not pool.fits_all or not small:
        return
    starts = {span.work: span.start_ms for span in best.timeline.spans}
    makespan, seconds = best.estimate.makespan_ms, deadline - time.process_time()
    solved = solve_order(problem, starts, makespan, seconds=max(0.0, seconds), seed=seed)
    if solved is None:
        return
    pool.offer("highs", solved.schedule)
    if min(solved.bound_ms, makespan) > pool.bound_ms:
        pool.bound_ms, pool.solver_bound = min(solved.bound_ms, makespan), True


def _made(make: Callable[[], Schedule]) -> Schedule:
    return make()


def _with_extra(problem: Problem, order: Schedule, split: bool) -> Schedule:
    """With the plan's extra forwards, where a generator knows none: each where its rank would wait, or must run it."""
    known = any(action.op is Op.EXTRA_FORWARD for row in order for action in row)
    if known or not problem.extra_actions:
        return order
    bare = without_weights(order) if split else order
    return list_schedule(problem, problem.plan.microbatches, order=bare, split=split)


def caps_within(problem: Problem, memory_bytes: int) -> tuple[Cap | None, ...]:
    """None where everything fits; else what state leaves for activations, and less: hidden states come on top."""
    ranks, stages_of = range(problem.num_ranks), problem.plan.stages_of
    weights = byte_cap(problem, ()).weights
    single = tuple(sum(weights[stage] for stage in stages_of(rank)) for rank in ranks)
    """Bytes that one microbatch in flight keeps on each rank."""
    held = map(problem.held_in_actions, range(problem.num_stages))
    working = [max(one.recomputed + one.workspace, one.forward) for one in held]
    always = [
        sum(always_held(problem, rank).values()) + max(working[stage] for stage in stages_of(rank)) for rank in ranks
    ]
    room = [memory_bytes - held for held in always]
    if all(problem.plan.microbatches * a <= b for a, b in zip(single, room, strict=True)):
        return (None,)
    limits = [tuple(max(0.0, share * free) for free in room) for share in (1.0, 0.9, 0.75)]
    return tuple(byte_cap(problem, limit) for limit in (*limits, single))


def _too_little_memory(problem: Problem, memory_bytes: int, smallest: int | None) -> InfeasibleError:
    state, step = (
        max(part(problem, rank) for rank in range(problem.num_ranks)) for part in (rank_state_bytes, rank_step_bytes)
    )
    less = "" if problem.rules.fused_optimizer else " (less if it is fused)"
    needed = f"{gigabytes(smallest, enough=True)} GB" if smallest is not None else "more"
    buffers = max(problem.communicator_bytes(rank) for rank in range(problem.num_ranks))
    of_messages = f" and buffers of communicators up to {buffers / 1e9:.3f} GB" if buffers else ""
    return InfeasibleError(
        f"no schedule found fits {memory_bytes / 1e9:.3f} GB a rank: the most frugal one needs {needed} on its "
        f"fullest rank, of which weights, gradients and optimizer state are up to {state / 1e9:.3f} GB{of_messages}, "
        f"and the optimizer's step needs up to {step / 1e9:.3f} GB beside them{less}; "
        "use more pipeline ranks, a smaller microbatch, recompute layers in backward, or raise the memory limit",
        needed_bytes=smallest,
        more="memory",
    )
