"""The order of actions: generators first, an exact model where it is small; the simulator alone decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepspeed_pulse.errors import InfeasibleError, PulseError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.plan import Estimate, Plan, Solver
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.schedule import Schedule
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner.exact import Solved, count_pairs, solve_order
from deepspeed_pulse.planner.heuristics import byte_cap, generators_for
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.listing import Cap
from deepspeed_pulse.planner.simulate import rank_state_bytes, run, summarize

MAX_BINARIES = 300
"""Largest exact model: beyond it HiGHS does not finish in half a minute."""

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
        e = self.estimate
        return (round(e.step_ms, 9), round(e.makespan_ms, 9), max(e.peak_bytes))


def synthesize(
    plan: Plan,
    profile: Profile,
    *,
    cluster: Cluster,
    schedule: str = "auto",
    memory_bytes: int | None = None,
    solver_seconds: float = 30.0,
    seed: int = 0,
) -> Plan:
    """The plan with the best order found, its estimate and solver; the plan's own schedule is not looked at.

    ``memory_bytes`` caps ``peak_bytes`` of every rank (None: no cap). Never worse than the best generator. The same
    arguments give the same plan as long as the exact model ends before ``solver_seconds``.

    Raises:
        ConfigError: ``schedule`` is not available or does not fit the placement; lists those that do.
        InfeasibleError: no order fits the memory; says how much would be needed.
    """
    instance = Instance(replace(plan, schedule=((),) * plan.pipeline_ranks), profile, cluster)
    best, fits_all = _best_generated(instance, schedule, memory_bytes)
    bound = best.estimate.lower_bound_ms
    may_solve = schedule == "auto" and solver_seconds > 0 and fits_all and best.estimate.gap > _PROVEN
    if may_solve and count_pairs(instance, plan.microbatches) <= MAX_BINARIES:
        solved = _solve(instance, best, solver_seconds, seed)
        best, bound = _better(instance, best, solved, bound, memory_bytes)
    tolerance = _PROVEN if bound == best.estimate.lower_bound_ms else _SOLVER_TOLERANCE
    optimal = best.estimate.makespan_ms <= bound * (1 + tolerance)
    return replace(
        plan,
        schedule=best.schedule,
        estimate=best.estimate,
        solver=Solver(name=best.name, optimal=optimal, seed=seed),
        profile_fingerprint=profile.fingerprint,
    )


def _best_generated(instance: Instance, schedule: str, memory_bytes: int | None) -> tuple[Candidate, bool]:
    """Best candidate within memory; and whether all candidates fit (the cap does not bind)."""
    best: Candidate | None = None
    smallest: int | None = None
    fits_all = True
    for candidate in _candidates(instance, schedule, memory_bytes):
        peak = max(candidate.estimate.peak_bytes)
        smallest = peak if smallest is None else min(smallest, peak)
        if memory_bytes is not None and peak > memory_bytes:
            fits_all = False
        elif best is None or candidate.rank < best.rank:
            best = candidate
            if best.estimate.gap <= _PROVEN and best.estimate.step_ms <= best.estimate.makespan_ms:
                break
    if best is None:
        raise _too_little_memory(instance, memory_bytes, smallest)
    return best, fits_all


def _candidates(instance: Instance, schedule: str, memory_bytes: int | None) -> Iterator[Candidate]:
    microbatches, caps = instance.plan.microbatches, _caps(instance, memory_bytes)
    found: set[Schedule] = set()
    for name, generator in generators_for(schedule, instance.placement).items():
        for make in generator.orders(instance, microbatches, caps):
            try:
                order = make()
            except InfeasibleError:
                continue
            if order not in found:
                found.add(order)
                yield _simulated(instance, name, order)


def _caps(instance: Instance, memory_bytes: int | None) -> tuple[Cap | None, ...]:
    """None where everything fits; else what state leaves for activations, and less: hidden states come on top."""
    single = _one_microbatch(instance)
    room = [(memory_bytes or 0) - rank_state_bytes(instance, rank) for rank in range(instance.num_ranks)]
    if memory_bytes is None or all(instance.plan.microbatches * a <= b for a, b in zip(single, room, strict=True)):
        return (None,)
    limits = [tuple(max(0.0, share * free) for free in room) for share in (1.0, 0.9, 0.75)]
    return tuple(byte_cap(instance, limit) for limit in (*limits, single))


def _one_microbatch(instance: Instance) -> tuple[float, ...]:
    """Bytes that one microbatch in flight keeps on each rank."""
    weights = byte_cap(instance, (0.0,) * instance.num_ranks).weights
    return tuple(sum(weights[s] for s in instance.plan.stages_of(rank)) for rank in range(instance.num_ranks))


def _simulated(instance: Instance, name: str, schedule: Schedule) -> Candidate:
    timeline = run(instance, schedule)
    return Candidate(name=name, schedule=schedule, timeline=timeline, estimate=summarize(instance, timeline))


def _too_little_memory(instance: Instance, memory_bytes: int | None, smallest: int | None) -> InfeasibleError:
    assert memory_bytes is not None
    states = [rank_state_bytes(instance, rank) for rank in range(instance.num_ranks)]
    needed = f"{smallest / 1e9:.3f} GB" if smallest is not None else "more"
    return InfeasibleError(
        f"no schedule found fits {memory_bytes / 1e9:.3f} GB a rank: the most frugal one needs {needed} on its "
        f"fullest rank, of which weights, gradients and optimizer state are up to {max(states) / 1e9:.3f} GB; use more "
        "pipeline ranks, a smaller microbatch, activation checkpointing, or raise the memory limit"
    )


def _solve(instance: Instance, best: Candidate, seconds: float, seed: int) -> Solved | None:
    starts = {span.action: span.start_ms for span in best.timeline.spans}
    makespan = best.estimate.makespan_ms
    return solve_order(instance, instance.plan.microbatches, starts, makespan, seconds=seconds, seed=seed)


def _better(
    instance: Instance, best: Candidate, solved: Solved | None, bound: float, memory_bytes: int | None
) -> tuple[Candidate, float]:
    """The solver's order if the simulator finds it better and it fits; and the stronger lower bound."""
    if solved is None:
        return best, bound
    bound = max(bound, min(solved.bound_ms, best.estimate.makespan_ms))
    try:
        candidate = _simulated(instance, "highs", solved.schedule)
    except PulseError:  # rounding of starts can part an order from its precedence; the generators' order stays
        return best, bound
    fits = memory_bytes is None or max(candidate.estimate.peak_bytes) <= memory_bytes
    return (candidate if fits and candidate.rank < best.rank else best), bound
