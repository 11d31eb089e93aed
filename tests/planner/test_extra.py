"""Orders with extra forwards: makespans in half-stages (forward 1, backward 2), memory, files, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from toys import cluster, layer, profile, skip, uniform

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.conditioning import SelfConditioned
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import Action, Op
from deepspeed_pulse.planner import Job, SearchOptions, make_plan, reorder, simulate, violations
from deepspeed_pulse.planner.bounds import lower_bound_ms
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import run

HALF = SelfConditioned(entry="estimate", layers=(0,), probability=0.5)


def job(P: int, M: int, **more: Any) -> Job:
    """Half of the microbatches have an extra forward; at most 2P half-stages are kept on a rank."""
    usual = {"cluster": cluster(memory_bytes=2 * P), "pipeline_ranks": P, "microbatches": M, "conditioning": (HALF,)}
    return Job(profile=more.pop("costs", uniform(2 * P)), **(usual | more))


def planned(one: Job, placement: str, **more: Any) -> Plan:
    return make_plan(one, SearchOptions(**{"placement": placement, "solver_seconds": 0.0, **more}))


def makespan(plan: Plan) -> float:
    assert plan.estimate is not None
    return plan.estimate.makespan_ms


@pytest.mark.parametrize(("P", "M", "expected"), [(4, 8, 74), (4, 16, 130), (8, 8, 98), (8, 16, 154)])
def test_linear_orders_are_the_best_there_are(P: int, M: int, expected: int) -> None:
    plan = planned(job(P, M), "linear")
    assert makespan(plan) == expected == plan.estimate.lower_bound_ms  # type: ignore[union-attr]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("P", "M", "expected"), [(4, 8, 65), (4, 16, 121), (8, 8, 84), (8, 16, 133)])
def test_wave_orders_are_the_best_there_are(P: int, M: int, expected: int) -> None:
    assert makespan(planned(job(P, M), "wave", solver_seconds=240.0)) <= expected


@pytest.mark.parametrize("placement", ["wave", "linear", "loop"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("readers", [(3,), (0, 7)])
def test_plans_are_sound(placement: str, split: bool, readers: tuple[int, ...]) -> None:
    costs = profile([layer() for _ in range(8)], skips=[skip("a", 0, 7), skip("b", 2, 5)])
    one = job(2, 5, costs=costs, conditioning=(replace(HALF, layers=readers, probability=0.6),), cluster=cluster())
    plan = planned(one, placement, split_backward=split)
    assert violations(plan, num_layers=8, values=costs.values) == []
    problem = Problem(plan, costs, one.cluster)
    assert makespan(plan) >= lower_bound_ms(problem, 5, split=split) - 1e-9
    extra = [a for row in plan.schedule for a in row if a.op is Op.EXTRA_FORWARD]
    assert len(extra) == 3 * plan.num_stages
    assert sorted({a.microbatch for a in extra}) == list(plan.conditioning[0].microbatches)


def test_an_estimate_is_there_before_it_is_read() -> None:
    costs = uniform(4, output_bytes=10)
    plan = planned(job(2, 4, costs=costs, cluster=cluster()), "linear")
    timeline = simulate(plan, costs, cluster())
    start = {span.work: span.start_ms for span in timeline.spans}
    end = {span.work: span.end_ms for span in timeline.spans}
    for m in plan.conditioning[0].microbatches:
        assert start[Action(0, Op.FORWARD, m)] >= end[Action(1, Op.EXTRA_FORWARD, m)]
    sent = [t.message for t in timeline.transfers if t.message.name == "estimate"]
    assert [(m.source_stage, m.target_stage) for m in sent] == [(1, 0)] * 2


def test_an_extra_forward_keeps_nothing_for_backward() -> None:
    plan = planned(job(1, 4, cluster=cluster()), "linear")
    bare = replace(plan, conditioning=(), schedule=_without_extra(plan))
    costs = uniform(2)
    with_extra, without = (max(run(Problem(p, costs, cluster()), p.schedule).memory[0]) for p in (plan, bare))
    assert with_extra[1] == without[1]


def _without_extra(plan: Plan) -> Any:
    return tuple(tuple(a for a in row if a.op is not Op.EXTRA_FORWARD) for row in plan.schedule)


def test_another_number_of_microbatches_has_as_many_as_that_makes() -> None:
    one = job(2, 4)
    plan = planned(one, "wave")
    again = reorder(plan, Job.of(plan, one.profile, one.cluster, microbatches=6), SearchOptions(solver_seconds=0.0))
    assert len(plan.conditioning[0].microbatches) == 2
    assert len(again.conditioning[0].microbatches) == 3
    assert violations(again, num_layers=4, values=()) == []


def test_a_file_is_read_as_it_was_written() -> None:
    plan = planned(job(2, 4), "wave")
    assert Plan.from_json(plan.to_json()) == plan
    assert '"self_conditioning"' in plan.to_json()
    plain = planned(job(2, 4, conditioning=()), "wave")
    assert "self_conditioning" not in plain.to_json() and "E" not in str(plain.to_dict()["schedule"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"probability": 1.5}, "a share of the microbatches, 0 to 1"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [9]}, "layers below 4 and microbatches below 4"),
        ({"microbatches": [3, 1]}, "numbers in ascending order"),
        ({"microbatches": [7]}, "layers below 4 and microbatches below 4"),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, Any], told: str) -> None:
    data = planned(job(2, 4), "wave").to_dict()
    data["self_conditioning"] = [{**data["self_conditioning"][0], **change}]
    with pytest.raises(FileError, match=told):
        Plan.from_json(json.dumps(data))


def test_a_schedule_without_an_extra_forward_is_told() -> None:
    plan = planned(job(2, 4), "wave")
    lines = violations(replace(plan, schedule=_without_extra(plan)), num_layers=4, values=())
    assert any("never runs: 0E" in line for line in lines), lines
    lines = violations(replace(plan, conditioning=()), num_layers=4, values=())
    assert any("its microbatch is not self-conditioned: 0E" in line for line in lines), lines
