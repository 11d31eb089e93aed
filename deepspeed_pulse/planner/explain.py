"""Why a measured step differs from the planned one: the plan simulated again with what was measured, part by part.

The order of actions is the plan's in every simulation. With planned times it takes the planned makespan; with
measured durations of the actions and planned pauses between them, what that adds is the layers'; with measured pauses,
what that adds is the pauses'; and what the measured makespan has beyond that is the messages'.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.run import Difference, RankMemory
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner.memory import parts_at_peak
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import at_peak, run


def explain(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    measured: Timeline,
    *,
    step_ms: float,
    peaks: Sequence[Mapping[str, int]] = (),
) -> Difference:
    """The parts of ``step_ms`` minus the planned step, and per rank those of its memory.

    Args:
        measured: every action of the plan once, with what its rank waited before it.
        step_ms: the measured step, from the start of ``train_batch`` to its end.
        peaks: per rank what its memory held at most, by :data:`~deepspeed_pulse.ir.run.MEMORY_PARTS`; empty: unknown.
    """
    problem = Problem(plan, profile, cluster)
    durations = {span.work: span.end_ms - span.start_ms for span in measured.spans}
    pauses = measured.pauses_ms()
    as_planned = run(problem, plan.schedule)
    planned = as_planned.makespan_ms
    overheads = {action: problem.overhead_ms(action) for action in durations}
    as_paused = {action: ms + overheads[action] for action, ms in durations.items()}
    with_layers = run(problem, plan.schedule, durations=as_paused).makespan_ms
    frozen = {span.work: span.end_ms - span.start_ms for span in measured.frozen}
    with_frozen = run(problem, plan.schedule, durations={**as_paused, **frozen}).makespan_ms
    paused = {action: ms + pauses.get(action, 0.0) for action, ms in durations.items()}
    handed = {} if plan.fill is None else {f.work: 0.0 for row in plan.fill.rows for f in row}  # among the pauses
    with_pauses = run(problem, plan.schedule, durations={**handed, **paused, **frozen}).makespan_ms
    planned_step = planned if plan.estimate is None else plan.estimate.step_ms
    layers_ms = {action: problem.duration_ms(action) - overheads[action] for action in durations}
    beyond: dict[int, float] = defaultdict(float)
    for action, ms in durations.items():
        beyond[action.stage] += ms - layers_ms[action]
    stage = max(beyond, key=lambda stage: (abs(beyond[stage]), -stage))  # whose actions differ most from the profile
    return Difference(
        planned_ms=planned_step,
        measured_ms=step_ms,
        layers_ms=with_layers - planned,
        frozen_ms=with_frozen - with_layers,
        pauses_ms=with_pauses - with_frozen,
        messages_ms=measured.makespan_ms - with_pauses,
        outside_ms=(step_ms - measured.makespan_ms) - (planned_step - planned),
        stage=stage,
        stage_planned_ms=_per_microbatch(plan, stage, layers_ms),
        stage_measured_ms=_per_microbatch(plan, stage, durations),
        mean_pause_ms=statistics.mean(pauses.values()),
        memory=_memory(problem, as_planned, peaks) if peaks else (),
    )


def _memory(problem: Problem, planned: Timeline, peaks: Sequence[Mapping[str, int]]) -> tuple[RankMemory, ...]:
    return tuple(
        RankMemory(planned=at_peak(problem, rank, parts), measured=peaks[rank])
        for rank, parts in enumerate(parts_at_peak(problem, planned))
    )


def _per_microbatch(plan: Plan, stage: int, durations: Mapping[Action, float]) -> float:
    return sum(ms for action, ms in durations.items() if action.stage == stage) / plan.microbatches
