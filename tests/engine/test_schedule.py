"""The schedule that upstream's loop walks: what each rank does, once, in the plan's order."""

from __future__ import annotations

from collections import Counter

import pytest
from deepspeed.runtime.pipe import schedule as upstream

from deepspeed_pulse.engine.engine import PulseEngine
from deepspeed_pulse.engine.plans.planning import with_schedule
from deepspeed_pulse.engine.schedule import FinishStep, PulseSchedule, ReduceStageGrads, RunStep
from deepspeed_pulse.ir.channels import make_traffic
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.ir.program import HIDDEN, Message
from deepspeed_pulse.ir.schedule import Direction, Op
from deepspeed_pulse.planner import Job, SearchOptions, forward_schedule, make_plan
from deepspeed_pulse.planner.cost import default_cluster

LAYERS = 16


def plan_of(placement: str, ranks: int, microbatches: int) -> Plan:
    cost = {"forward_ms": 1.0, "backward_ms": 2.0, "param_bytes": 8, "activation_bytes": 8, "output_bytes": 8}
    layers = tuple(LayerCost(name=f"l{i}", **cost) for i in range(LAYERS))
    profile = Profile(name="even", device="cpu", dtype="float32", microbatch_size=1, layers=layers, skips=())
    return make_plan(
        Job(profile=profile, cluster=default_cluster(ranks, 2**40), pipeline_ranks=ranks, microbatches=microbatches),
        SearchOptions(placement=placement, schedule="auto", solver_seconds=0),
    )


def schedules(plan: Plan, *, training: bool = True) -> list[PulseSchedule]:
    sizes = {"micro_batches": plan.microbatches, "stages": plan.pipeline_ranks}
    return [
        PulseSchedule(steps, training=training, reduce_early=training, stage_id=rank, **sizes)
        for rank, steps in enumerate(make_traffic(plan).program)
    ]


def instructions(schedule: PulseSchedule) -> list[upstream.PipeInstruction]:
    return [instruction for step in schedule for instruction in step]


def messages(schedule: PulseSchedule) -> tuple[list[Message], list[Message]]:
    """(received, sent)."""
    steps = [i.step for i in instructions(schedule) if isinstance(i, RunStep)]
    return [m for step in steps for m in step.receives], [m for step in steps for m in step.sends]


SIZES = [("wave", 1, 4), ("linear", 1, 4), ("wave", 3, 8), ("linear", 3, 8), ("wave", 4, 1), ("linear", 4, 3)]


@pytest.mark.parametrize(("placement", "ranks", "microbatches"), SIZES)
def test_every_action_once_in_the_plans_order_then_one_optimizer_step(
    placement: str, ranks: int, microbatches: int
) -> None:
    plan = plan_of(placement, ranks, microbatches)
    for rank, schedule in enumerate(schedules(plan)):
        found = instructions(schedule)
        actions = [i.step.action for i in found if isinstance(i, RunStep)]
        assert tuple(actions) == plan.schedule[rank]
        ops = Counter((a.stage, a.op, a.microbatch) for a in actions)
        stages = plan.stages_of(rank)
        assert set(ops.values()) == {1} and len(ops) == 2 * microbatches * len(stages)
        for stage in stages:
            for m in range(microbatches):
                forward, backward = (
                    next(p for p, a in enumerate(actions) if (a.stage, a.op, a.microbatch) == (stage, op, m))
                    for op in (Op.FORWARD, Op.BACKWARD)
                )
                assert forward < backward
        kinds = Counter(map(type, found))
        assert all(kind in PulseEngine._INSTRUCTION_MAP for kind in kinds)
        assert type(found[-1]) is upstream.OptimizerStep
        assert kinds[ReduceStageGrads] == len(stages)
        for once in (FinishStep, upstream.ReduceTiedGrads, upstream.ReduceGrads, upstream.OptimizerStep):
            assert kinds[once] == 1, once
        assert list(map(repr, instructions(schedule))) == list(map(repr, found)), "can be walked again"
        assert schedule.num_pipe_buffers() == 0, "upstream's own buffers are not used"


@pytest.mark.parametrize("microbatches", [1, 3, 8, 10])
@pytest.mark.parametrize("placement", ["wave", "linear"])
def test_an_evaluation_runs_forwards_only(placement: str, microbatches: int) -> None:
    plan = plan_of(placement, 3, 4)
    plan = with_schedule(plan, forward_schedule(plan, microbatches), microbatches)
    for rank, schedule in enumerate(schedules(plan, training=False)):
        found = instructions(schedule)
        actions = [i.step.action for i in found if isinstance(i, RunStep)]
        assert {a.op for a in actions} == {Op.FORWARD}
        assert len(actions) == microbatches * len(plan.stages_of(rank))
        assert {type(i) for i in found} == {RunStep, FinishStep}
        assert all(m.direction is Direction.FORWARD for way in messages(schedule) for m in way)


@pytest.mark.parametrize(("placement", "ranks", "microbatches"), SIZES)
def test_what_is_sent_is_received(placement: str, ranks: int, microbatches: int) -> None:
    """In linear placement the ends of the pipeline are idle on one side, as upstream's are."""
    found = [messages(schedule) for schedule in schedules(plan_of(placement, ranks, microbatches))]
    received = Counter(m for row, _ in found for m in row)
    sent = Counter(m for _, row in found for m in row)
    assert received == sent and set(sent.values()) <= {1}
    boundaries = (2 * ranks - 2) if placement == "wave" else ranks - 1
    assert len(sent) == 2 * boundaries * microbatches
    assert all(m.name == HIDDEN for m in sent)
    if placement == "linear" and ranks > 1:
        (first_in, first_out), (last_in, last_out) = found[0], found[-1]
        assert {m.direction for m in first_in} == {m.direction for m in last_out} == {Direction.BACKWARD}
        assert {m.direction for m in first_out} == {m.direction for m in last_in} == {Direction.FORWARD}
