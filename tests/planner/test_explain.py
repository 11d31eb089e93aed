"""The parts of a difference: each is found alone, in full, and together they add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from toys import cluster

from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.ir.run import Difference
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner import Job, SearchOptions, make_plan, simulate
from deepspeed_pulse.planner.explain import explain
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import run

RANKS, MICROBATCHES = 2, 4


def profile(*, slow: int | None = None) -> Profile:
    layers = [
        LayerCost(name=f"l{i}", forward_ms=1.0, backward_ms=2.0, param_bytes=0, activation_bytes=1, output_bytes=10**6)
        for i in range(4)
    ]
    if slow is not None:
        layers[slow] = replace(layers[slow], forward_ms=2.5, backward_ms=5.0)
    return Profile(name="toy", device="d", dtype="float32", microbatch_size=1, layers=tuple(layers), skips=())


COSTS, CLUSTER = profile(), cluster()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(
        Job(profile=COSTS, cluster=CLUSTER, pipeline_ranks=RANKS, microbatches=MICROBATCHES),
        SearchOptions(placement="wave", solver_seconds=0),
    )


def with_waits(timeline: Timeline) -> Timeline:
    """As the engine measures: what a rank did not work, it waited."""
    spans, free = [], [min(span.start_ms for span in timeline.spans)] * timeline.num_ranks
    for span in timeline.spans:
        spans.append(replace(span, waited_ms=span.start_ms - free[span.rank]))
        free[span.rank] = span.end_ms
    return replace(timeline, spans=tuple(spans))


def parts(found: Difference) -> tuple[float, float, float, float]:
    return found.layers_ms, found.pauses_ms, found.messages_ms, found.outside_ms


def test_memory_is_told_by_its_parts(plan: Plan) -> None:
    """The planned ones add up to the planned peak of every rank."""
    measured = with_waits(simulate(plan, COSTS, CLUSTER))
    peaks = [{"state": 0, "activations": 9, "received": 10**6}] * RANKS
    found = explain(plan, COSTS, CLUSTER, measured, step_ms=plan.estimate.step_ms, peaks=peaks)
    assert tuple(memory.planned_bytes for memory in found.memory) == plan.estimate.peak_bytes
    assert [memory.measured_bytes for memory in found.memory] == [10**6 + 9] * RANKS
    assert all(memory.planned["activations"] > 0 for memory in found.memory)
    assert explain(plan, COSTS, CLUSTER, measured, step_ms=1.0).memory == ()


def test_a_step_as_planned_differs_in_nothing(plan: Plan) -> None:
    measured = with_waits(simulate(plan, COSTS, CLUSTER))
    found = explain(plan, COSTS, CLUSTER, measured, step_ms=plan.estimate.step_ms)
    assert parts(found) == pytest.approx((0, 0, 0, 0), abs=1e-9) and found.share == 0


def test_slow_layers_are_named_with_their_stage(plan: Plan) -> None:
    slow = profile(slow=2)
    measured = with_waits(simulate(replace(plan, profile_fingerprint=None), slow, CLUSTER))
    more = measured.makespan_ms - plan.estimate.makespan_ms
    found = explain(plan, COSTS, CLUSTER, measured, step_ms=plan.estimate.step_ms + more)
    assert parts(found) == pytest.approx((more, 0, 0, 0), abs=1e-9) and more > 5
    assert found.stage == plan.stage_of(2)
    assert (found.stage_planned_ms, found.stage_measured_ms) == pytest.approx((3.0, 7.5))


def test_slow_encoders_are_no_slow_links(plan: Plan) -> None:
    layer = FrozenLayer(name="e", forward_ms=0.5, param_bytes=0, output_bytes=10, activation_bytes=10)
    part = FrozenPart(name="latents", layers=(layer,), targets=(0,))
    job = Job(profile=COSTS, cluster=CLUSTER, pipeline_ranks=RANKS, microbatches=MICROBATCHES, frozen=(part,))
    filled = make_plan(job, SearchOptions(placement="wave", solver_seconds=0))
    slow = replace(part, layers=(replace(layer, forward_ms=8.0),))
    assert filled.fill is not None and filled.estimate is not None
    slower = replace(filled, fill=replace(filled.fill, parts=(slow,)))
    measured = with_waits(simulate(slower, COSTS, CLUSTER))
    more = measured.makespan_ms - filled.estimate.makespan_ms
    found = explain(filled, COSTS, CLUSTER, measured, step_ms=filled.estimate.step_ms + more)
    assert found.frozen_ms == pytest.approx(more) and more > 5
    assert parts(found) == pytest.approx((0, 0, 0, 0), abs=1e-9)


def test_a_slow_link_is_what_ranks_waited_for(plan: Plan) -> None:
    slow_link = replace(CLUSTER.intra_node, latency_us=3000.0)
    slow = replace(CLUSTER, intra_node=slow_link, inter_node=slow_link)
    measured = with_waits(simulate(plan, COSTS, slow))
    more = measured.makespan_ms - plan.estimate.makespan_ms
    found = explain(plan, COSTS, CLUSTER, measured, step_ms=plan.estimate.step_ms + more)
    assert parts(found) == pytest.approx((0, 0, more, 0), abs=1e-9) and more > 5


def pausing(plan: Plan, pauses: Mapping[Action, float]) -> Timeline:
    """As measured where a rank pauses after actions, ms."""
    problem = Problem(plan, COSTS, CLUSTER)
    durations = {a: problem.duration_ms(a) + pauses[a] for row in plan.schedule for a in row}
    timeline = with_waits(run(problem, plan.schedule, durations=durations))
    return replace(timeline, spans=tuple(replace(s, end_ms=s.end_ms - pauses[s.work]) for s in timeline.spans))


def test_planned_pauses_are_no_difference(plan: Plan) -> None:
    """Every end of a message keeps its rank for 0.5 ms."""
    link = replace(CLUSTER.intra_node, overhead_us=500.0)
    machines = replace(CLUSTER, intra_node=link, inter_node=link)
    problem = Problem(plan, COSTS, machines)
    pauses = {action: problem.overhead_ms(action) for row in plan.schedule for action in row}
    assert set(pauses.values()) == {0.5}
    planned_ms = simulate(plan, COSTS, machines).makespan_ms
    planned = replace(plan, estimate=replace(plan.estimate, makespan_ms=planned_ms, step_ms=planned_ms))
    found = explain(planned, COSTS, machines, pausing(plan, pauses), step_ms=planned_ms)
    # what follows a rank's last action is no pause
    assert parts(found) == pytest.approx((0, -0.5, 0, 0.5), abs=1e-9)
    assert (found.stage_planned_ms, found.stage_measured_ms) == pytest.approx((3.0, 3.0))


def test_pauses_and_what_lies_outside(plan: Plan) -> None:
    measured = pausing(plan, {action: 0.5 for row in plan.schedule for action in row})
    found = explain(plan, COSTS, CLUSTER, measured, step_ms=measured.makespan_ms + 10)
    assert found.layers_ms == pytest.approx(0) and found.pauses_ms > 2
    assert found.mean_pause_ms == pytest.approx(0.5)
    assert found.messages_ms == pytest.approx(0, abs=1e-9)
    assert found.outside_ms == pytest.approx(10)
    assert sum(parts(found)) == pytest.approx(found.measured_ms - found.planned_ms)
