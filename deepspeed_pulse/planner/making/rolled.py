"""Plans of several backbones, each of which makes its own optimizer step: where that is asked for, or faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.carried import Part, meeting_problems, with_carried
from deepspeed_pulse.ir.channels import make_traffic
from deepspeed_pulse.ir.choice import may_step_apart
from deepspeed_pulse.ir.plan import Plan, Solver
from deepspeed_pulse.planner.checks.rendezvous import rendezvous_problems
from deepspeed_pulse.planner.filling.fill import fill_behind, most_bytes
from deepspeed_pulse.planner.job import Job, SearchOptions
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import halves_tried
from deepspeed_pulse.planner.schedules.rolling import TRIALS, rolling_orders
from deepspeed_pulse.planner.search.synthesize import caps_within
from deepspeed_pulse.planner.simulator import busiest_ms, run, step_ms, summarize

_QUICK_TRIALS = 60
"""Where nothing is searched for."""

_PROVEN = 1e-9


def with_own_steps(plan: Plan, job: Job, options: SearchOptions) -> Plan:
    """The plan as it is, or one of the same cuts whose backbones make their own steps (``options.backbone_steps``).

    Raises:
        ConfigError: that is asked for, but cannot be.
        InfeasibleError: that is asked for, but no such order fits the memory.
    """
    asked = options.backbone_steps == "each"
    if not plan.backbones and asked:
        raise ConfigError('"backbone_steps": "each": expected several backbones, found one; use "together"')
    if not plan.backbones or options.backbone_steps == "together":
        return plan
    if not may_step_apart(job.profile.dtype):
        if asked:
            raise ConfigError(
                f'"backbone_steps": "each": expected a profile in float32 or bfloat16, found {job.profile.dtype}; '
                'use "together"'
            )
        return plan
    found = min(_rolled(plan, job, options), key=step_ms, default=None)
    if found is None and job.frozen:
        spare = job.limit_bytes - most_bytes(job.frozen, job.microbatches)
        found = min(_rolled(plan, job, options, max(0, spare)), key=step_ms, default=None)
    if found is None and asked:
        raise InfeasibleError(
            '"backbone_steps": "each": no such order fits the memory; use "together", a smaller microbatch or '
            "activation checkpointing"
        )
    return plan if found is None or not (asked or step_ms(found) < step_ms(plan) * (1 - _PROVEN)) else found


def _rolled(plan: Plan, job: Job, options: SearchOptions, memory_bytes: int | None = None) -> Iterator[Plan]:
    """Those that fit, each with a faster order than those before with backwards as whole and as much room.

    ``memory_bytes``: what orders may need without frozen work; None: the job's.
    """
    bare = replace(with_carried(plan, ()), schedule=((),) * plan.pipeline_ranks, fill=None)
    room = job.limit_bytes if memory_bytes is None else memory_bytes
    problem = Problem(bare, job.profile, job.cluster)
    bound_ms = busiest_ms(problem)
    trials = TRIALS if options.solver_seconds else _QUICK_TRIALS
    for split in reversed(halves_tried(options, job.profile)):
        for cap in caps_within(problem, room):
            best: Plan | None = None
            orders = rolling_orders(problem, cap, split=split, bound_ms=bound_ms, seed=options.seed, trials=trials)
            for order in orders:
                made = with_carried(replace(bare, schedule=order.schedule), order.carried)
                fitting = _judged(made, job)
                if fitting is not None:
                    best = fitting
                    yield best
            if best is not None and _is_optimal(best):
                return


def _judged(plan: Plan, job: Job) -> Plan | None:
    """With its frozen work and its figures; None where it does not fit, or could not run."""
    problem = Problem(plan, job.profile, job.cluster)
    figures = summarize(problem, run(problem, plan.schedule))
    stuck = any(rendezvous_problems(plan, make_traffic(plan, part)) for part in Part)
    if max(figures.peak_bytes) > job.limit_bytes or stuck or any(meeting_problems(plan)):
        return None
    found = replace(plan, estimate=figures, profile_fingerprint=job.profile.fingerprint)
    if job.frozen:
        try:
            found = fill_behind(found, job)
        except InfeasibleError:
            return None
    return replace(found, solver=Solver(name="rolling", optimal=_is_optimal(found)))


def _is_optimal(plan: Plan) -> bool:
    """No steady state is shorter."""
    return plan.figures.summed_ms <= plan.figures.lower_bound_ms * (1 + _PROVEN)
