"""The optimizer's step in plans: as long as the fullest rank's, divided where its state is, weighed by choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import layer, profile, uniform

from deepspeed_pulse.ir.choice import Constraints, Verdict
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.joined import joined_profile
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, make_plan, tune
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import least_step_ms

FAST = Link(bandwidth_gb_per_s=1e9, latency_us=0.0)
GB = 10**9


def box(ranks: int) -> Cluster:
    return Cluster(name="box", nodes=1, ranks_per_node=ranks, memory_bytes=10**15, intra_node=FAST, inter_node=FAST)


def stepping(costs, ms_per_gb=1.0, dtype="float32"):
    return replace(costs, dtype=dtype, optimizer_ms_per_gb=ms_per_gb)


def planned(costs, ranks=1, replicas=1, zero_stage=0, **options):
    job = Job(
        profile=costs,
        cluster=box(ranks * replicas),
        pipeline_ranks=ranks,
        data_parallel=replicas,
        microbatches=4,
        rules=Rules.of(zero_stage),
    )
    return make_plan(job, SearchOptions(solver_seconds=0.0, **options))


@pytest.mark.parametrize(
    ("dtype", "replicas", "zero_stage", "expected_ms"),
    [("float32", 1, 0, 8.0), ("float32", 2, 0, 8.0), ("float32", 2, 1, 4.0), ("bfloat16", 2, 0, 4.0)],
)
def test_a_step_ends_with_the_optimizer_s(dtype, replicas, zero_stage, expected_ms):
    plain = profile([layer(param_bytes=2 * GB)] * 4)
    without, found = (
        planned(costs, replicas=replicas, zero_stage=zero_stage).estimate
        for costs in (stepping(plain, 0.0, dtype), stepping(plain, dtype=dtype))
    )
    assert found.optimizer_ms == expected_ms
    assert found.step_ms == pytest.approx(without.step_ms + expected_ms)
    assert found.makespan_ms == without.makespan_ms


def test_the_fullest_rank_s_counts():
    costs = stepping(profile([layer(param_bytes=GB), layer(param_bytes=3 * GB)]))
    found = planned(costs, ranks=2, boundaries=(0, 1, 2), placement="linear")
    assert found.estimate.optimizer_ms == 3.0


def test_no_order_is_shorter_than_the_bound_with_it_and_a_proof_stays_one():
    costs = stepping(uniform(8, param_bytes=GB))
    found = planned(costs, ranks=2, placement="linear")
    assert found.estimate.hides_sums
    assert least_step_ms(Problem(found, costs, box(2))) <= found.estimate.step_ms * (1 + 1e-9)
    assert found.solver == planned(replace(costs, optimizer_ms_per_gb=0.0), ranks=2, placement="linear").solver


def test_cuts_weigh_what_a_rank_steps():
    """The last two layers have all parameters: each rank steps one where that is worth more work on the first."""
    layers = [*[layer(param_bytes=0)] * 5, *[layer(param_bytes=60 * GB)] * 2]
    plain, weighed = (planned(stepping(profile(layers), ms), ranks=2, placement="linear") for ms in (0.0, 1.0))
    fixed = planned(stepping(profile(layers)), ranks=2, placement="linear", boundaries=plain.boundaries)
    assert (weighed.boundaries, weighed.estimate.optimizer_ms) == ((0, 6, 7), 60.0)
    assert weighed.estimate.step_ms < fixed.estimate.step_ms


def test_what_steps_all_parameters_on_every_rank_is_chosen_only_where_that_is_quick():
    """Sums cost nothing here, so data parallelism has no bubble; a pipeline's ranks step a half each."""
    given = Constraints(zero_stage=0, waves=(0, 1), loops=())

    def ranks_chosen(ms_per_gb):
        costs = stepping(uniform(8, param_bytes=GB), ms_per_gb)
        job = OpenJob(profiles=[costs], cluster=box(2), global_batch=16, given=given)
        return tune(job, solver_seconds=0.0).best.choice.pipeline_ranks

    assert (ranks_chosen(0.0), ranks_chosen(100.0)) == (1, 2)


@pytest.mark.parametrize(
    ("ms_per_gb", "dtype", "bandwidth", "zero_stage"),
    [
        (0.0, "float32", 1e9, 0),
        (10.0, "float32", 1e9, 1),
        (1.0, "float32", 300.0, 0),  # behind backward, sums of gradients are hidden
        (10.0, "bfloat16", 1e9, 0),
    ],
)
def test_an_optimizer_is_shared_where_that_is_faster(ms_per_gb, dtype, bandwidth, zero_stage):
    link = Link(bandwidth_gb_per_s=bandwidth, latency_us=0.0)
    costs = stepping(uniform(8, param_bytes=GB), ms_per_gb, dtype)
    cluster = replace(box(4), intra_node=link, inter_node=link)
    given = Constraints(pipeline_ranks=1)
    found = tune(OpenJob(profiles=[costs], cluster=cluster, global_batch=16, given=given), solver_seconds=0.0)
    assert found.best.choice.zero_stage == zero_stage
    others = [trial.verdict for trial in found.trials if trial.choice.zero_stage == 1]
    assert (Verdict.NO_GAIN in others) == (not ms_per_gb)  # in bf16 stage 0 shares it, and gathers weights, too


def test_several_backbones_have_the_mean_of_their_bytes():
    small = replace(stepping(uniform(2, param_bytes=GB), 1.0), name="small")
    large = replace(stepping(uniform(2, param_bytes=3 * GB), 3.0), name="large")
    assert joined_profile([small, large]).optimizer_ms_per_gb == 2.5
    frozen = [replace(one, layers=tuple(replace(x, param_bytes=0) for x in one.layers)) for one in (small, large)]
    assert joined_profile(frozen).optimizer_ms_per_gb == 0.0
