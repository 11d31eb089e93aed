"""Choosing how to run a model: bounds prune nothing that is best, every rejection has its reason."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import layer, profile, random_profile, skip, uniform

from deepspeed_pulse.config import parse_pulse
from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.choice import Constraints, Verdict
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, check, estimate, make_plan, tune
from deepspeed_pulse.planner.ideal import ideal_ms, least_makespan
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import least_step_ms
from deepspeed_pulse.planner.tuning.sizes import Sizes, scaled
from deepspeed_pulse.planner.tuning.tuner import Tuner


def box(nodes=1, ranks_per_node=4, memory_bytes=10**15, intra=1e9, inter=1e9) -> Cluster:
    return Cluster(
        name="box",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        memory_bytes=memory_bytes,
        intra_node=Link(bandwidth_gb_per_s=intra, latency_us=0.0),
        inter_node=Link(bandwidth_gb_per_s=inter, latency_us=0.0),
    )


def tuned(costs, cluster, batch, **options):
    options.setdefault("solver_seconds", 0)
    costs = costs if isinstance(costs, list) else [costs]
    searched = {
        name: options.pop(name)
        for name in ("solver_seconds", "exhaustive", "progress", "most_seconds")
        if name in options
    }
    found = tune(OpenJob(profiles=costs, cluster=cluster, global_batch=batch, **options), **searched)
    best = found.best
    check(best.planned, num_layers=costs[0].num_layers, values=costs[0].values)
    again = estimate(best.planned, found.profiles[best.choice.microbatch_size], cluster)
    assert again == best.planned.estimate
    assert max(again.peak_bytes) <= found.memory_bytes
    return found


def test_where_others_wait_the_best_so_far_is_taken():
    """One choice is planned at least. The others are told as such, and the finer ones are not begun."""
    found = tuned(uniform(8), box(), 8, most_seconds=0.0)
    untried = [trial for trial in found.rejected if trial.verdict is Verdict.UNTRIED]
    assert len(found.ranked) == 1 and len(untried) > 3
    assert "after 0 s the best so far is taken; ds_pulse tune tries all" in untried[0].reason
    assert not {Verdict.UNTRIED} & {trial.verdict for trial in tuned(uniform(8), box(), 8).rejected}


def test_the_first_choices_that_are_tried_differ_in_pipeline_ranks_and_are_quick_to_cut():
    """Each with both ZeRO stages where it has replicas."""
    job = OpenJob(profiles=[uniform(16)], cluster=box(2, 4), global_batch=16)
    first = [trial.choice for trial in Tuner(job).run(exhaustive=False, progress=None)[: 2 * 3 + 1]]
    assert {choice.pipeline_ranks for choice in first} == {1, 2, 4, 8}
    assert all(choice.waves <= 1 and not choice.loop for choice in first)


@st.composite
def jobs(draw):
    """A small model on two nodes of two, links from none to slow ones, memory from plenty to too little."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    costs = random_profile(rng, draw(st.integers(3, 8)), temb=rng.random() < 0.3)
    times = st.sampled_from([0, 10])
    layers = [
        replace(x, param_bytes=x.param_bytes * draw(times), frozen_bytes=x.param_bytes * draw(times))
        for x in costs.layers
    ]
    stepping = draw(st.sampled_from([0.0, 10 * costs.layers[0].forward_ms * 1e9 / max(1, costs.param_bytes)]))
    costs = replace(costs, layers=tuple(layers), optimizer_ms_per_gb=stepping)
    speeds = st.sampled_from([1e-6, 1e-5, 1e9])
    most = sum(4 * x.param_bytes + x.frozen_bytes + 8 * x.activation_bytes for x in costs.layers)
    memory = int(most * draw(st.sampled_from([0.2, 0.35, 0.5, 0.7, 10.0]))) + 1
    return costs, box(2, 2, memory, draw(speeds), draw(speeds)), draw(st.sampled_from([4, 8]))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(jobs())
def test_bounds_never_exclude_the_best(job):
    costs, cluster, batch = job
    steps = []
    for exhaustive in (False, True):
        try:
            found = tuned(costs, cluster, batch, exhaustive=exhaustive)
        except InfeasibleError:
            steps.append(None)
        else:
            steps.append([trial.planned.estimate.step_ms for trial in found.ranked[:4]])
    assert steps[0] == pytest.approx(steps[1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(0, 2), st.integers(1, 9))
def test_no_plan_is_shorter_than_the_ideal(seed, ranks, waves, microbatches):
    costs = random_profile(random.Random(seed), 2 * ranks * max(waves, 1) + seed % 4)
    cluster = box(2, 4, intra=1e-6, inter=1e-6)  # a byte a ms
    made = make_plan(
        Job(profile=costs, cluster=cluster, data_parallel=2, pipeline_ranks=ranks, microbatches=microbatches),
        SearchOptions(placement="wave" if waves else "linear", waves=waves or 1, solver_seconds=0),
    )
    assert made.estimate.makespan_ms >= ideal_ms(costs, made.placement, microbatches)
    least = ideal_ms(costs, made.placement, microbatches, reduction_ms=costs.param_bytes)
    assert made.estimate.step_ms * (1 + 1e-9) >= least_step_ms(Problem(made, costs, cluster)) >= least * (1 - 1e-9)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 8), (8, 2), (16, 64)])
def test_the_ideal_of_a_linear_placement_has_a_closed_form(ranks, microbatches):
    """All ranks' rows are equations: L (1 - (1 - 1/M)^P) = 1."""
    expected = 1 / (1 - (1 - 1 / microbatches) ** ranks)
    assert least_makespan(Placement.linear(ranks), microbatches) == pytest.approx(expected, rel=1e-5)
    assert least_makespan(Placement.wave(ranks), microbatches) <= expected * (1 + 1e-9)


def test_a_model_that_fits_everywhere_runs_data_parallel():
    """Nothing to reduce, so one rank a pipeline has no bubble; sharding it gains nothing."""
    found = tuned(uniform(8), box(), 16)
    choice = found.best.choice
    assert (choice.pipeline_ranks, choice.data_parallel, choice.zero_stage, choice.waves) == (1, 4, 0, 0)
    assert found.best.planned.estimate.bubble_ratio == pytest.approx(0)
    assert {trial.verdict for trial in found.rejected} >= {Verdict.NO_GAIN}
    assert all(trial.reason for trial in found.rejected)


def test_gradients_are_reduced_while_earlier_layers_work():
    """Eight layers of 3 ms a step, 1 ms to reduce each: all but the first's are hidden, with one stage as with more."""
    costs, cluster = uniform(8, param_bytes=10**3, output_bytes=1), box(intra=1.5e-3, inter=1.5e-3)
    found = tuned(costs, cluster, 4, given=Constraints(pipeline_ranks=1), exhaustive=True)
    hidden = {trial.choice.waves: trial.planned.estimate for trial in found.ranked if not trial.choice.zero_stage}
    assert {waves: figures.step_ms - figures.makespan_ms for waves, figures in hidden.items()} == pytest.approx(
        {0: 1.0, 1: 1.0, 2: 1.0}
    )
    assert found.best.choice.waves == 0


def test_several_stages_a_rank_reduce_the_later_ones_gradients_before_the_last_microbatch():
    """40 ms of reduction behind a backward of 16 ms: what a stage has done by then has a head start."""
    costs, cluster = uniform(8, param_bytes=10**3, output_bytes=1), box(intra=3e-4, inter=3e-4)
    found = tuned(costs, cluster, 16, given=Constraints(pipeline_ranks=1, microbatches=4), exhaustive=True)
    behind = {
        trial.choice.waves: trial.planned.estimate.step_ms - trial.planned.estimate.makespan_ms
        for trial in found.ranked
        if not trial.choice.zero_stage
    }
    assert behind[0] == pytest.approx(26.0) and behind[2] < behind[1] < behind[0]


def test_slow_links_and_large_weights_make_pipelines():
    heavy = uniform(8, param_bytes=10**6, output_bytes=10)
    found = tuned(heavy, box(intra=1e-1, inter=1e-1), 16)
    assert found.best.choice.pipeline_ranks == 4


def test_zero_1_is_taken_where_the_optimizer_state_does_not_fit():
    """State 4 x 800 bytes, and 800 to step; shared by four 2 x 800, a bucket of 800 and 3 x 800 / 4, and 800 to sum."""
    costs = uniform(8, param_bytes=100, activation_bytes=0)
    found = tuned(costs, box(memory_bytes=3900), 16)
    assert (found.best.choice.pipeline_ranks, found.best.choice.zero_stage) == (1, 1)
    assert found.best.needed_bytes == 3800
    alone = next(trial for trial in found.rejected if trial.choice.pipeline_ranks == 1 and not trial.choice.zero_stage)
    assert (alone.verdict, alone.needed_bytes) == (Verdict.MEMORY, 4000)
    assert "optimizer state and its step alone need" in alone.reason


def test_where_hosts_send_what_sends_least_is_taken_of_choices_about_as_fast():
    """Three waves are 1.8 % faster than one by plan, and send three times as much."""
    halves = {"backward_ms": 10.0, "weight_grad_ms": 5.0, "input_grad_ms": 5.0}
    costs = profile([layer(forward_ms=5.0, **halves, output_bytes=10**4, param_bytes=10**9) for _ in range(32)])
    found, given = {}, Constraints(microbatch_size=1, loops=())
    for overhead_us in (0.0, 100.0):
        link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0, overhead_us=overhead_us)
        found[overhead_us] = tuned(costs, replace(box(), intra_node=link, inter_node=link), 16, given=given)
    assert found[0.0].best.choice.waves == 3
    best, *others = found[100.0].ranked
    assert best.choice.waves == 1
    faster = [trial for trial in others if trial.figures.step_ms < best.figures.step_ms]
    assert faster and best.figures.step_ms < 1.03 * faster[0].figures.step_ms
    assert all(trial.figures.p2p_bytes_per_microbatch > best.figures.p2p_bytes_per_microbatch for trial in faster)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_base_is_whole_on_every_replica_and_is_not_summed(dtype):
    """Adapters of 1 % train; what the optimizer has is shared under ZeRO-1, and in bf16 anyway."""
    costs = profile([layer(param_bytes=10, frozen_bytes=1000, activation_bytes=0) for _ in range(8)], dtype=dtype)
    slow = box(intra=1e-6)
    alone = estimate(tuned(costs, slow, 8, given=Constraints(pipeline_ranks=1, zero_stage=1)).best.planned, costs, slow)
    assert 8 * 1000 < max(alone.peak_bytes) < 8 * 1000 + 8 * 8 * 10
    assert alone.step_ms - alone.makespan_ms < 2 * 8 * 10 / 1e-6 / 1e6
    with pytest.raises(InfeasibleError):
        tuned(costs, box(memory_bytes=8000), 8, given=Constraints(pipeline_ranks=1))
    assert tuned(costs, box(memory_bytes=4000), 8).best.choice.pipeline_ranks > 1


def test_a_bucket_that_is_full_is_counted_once_a_rank():
    """8 GB of weights on one of two ranks: buckets have 2 GB, however many layers there are. 16, 2, 12 and 2 beside."""
    costs = uniform(4, param_bytes=4 * 10**9, activation_bytes=0)
    given = Constraints(pipeline_ranks=2, zero_stage=1, waves=(0,), loops=())
    found = tuned(costs, box(memory_bytes=35 * 10**9), 16, given=given, exhaustive=True)
    assert found.best.needed_bytes == 32 * 10**9


def test_what_fits_exactly_fits():
    """So there is nothing that a shared optimizer would gain."""
    costs = uniform(8, param_bytes=100, activation_bytes=0)
    found = tuned(costs, box(memory_bytes=4000), 16)
    assert found.best.needed_bytes == 4000
    shared = next(trial for trial in found.rejected if trial.choice.pipeline_ranks == 1 and trial.choice.zero_stage)
    assert shared.verdict is Verdict.NO_GAIN


@pytest.mark.parametrize(("memory_bytes", "rounds"), [(10**9, {2, 4}), (700, {2, 4, 6})])
def test_loops_of_six_rounds_are_tried_where_memory_costs_time(memory_bytes, rounds):
    """With 10**9 bytes the fastest choice fits."""
    told: list[tuple[int, int]] = []
    found = tuned(
        uniform(12, activation_bytes=100),
        box(1, 2, memory_bytes=memory_bytes),
        8,
        progress=lambda done, count, best: told.append((done, count)),
    )
    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1))
    assert {2 * trial.choice.waves for trial in found.trials if trial.choice.loop} == rounds


@pytest.mark.parametrize(("waves", "tried"), [((0, 1, 2), {0, 1, 2, 3, 4}), ((0, 1), {0, 1}), ((2,), {2})])
def test_more_waves_are_tried_as_long_as_they_are_faster_and_none_is_settled(waves, tried):
    """These layers are balanced best by three waves."""
    times = (2, 2, 1, 8, 5, 2, 1, 3, 1, 2, 3, 1, 3, 8, 2, 8)
    costs = profile([layer(forward_ms=ms, backward_ms=2 * ms, activation_bytes=1) for ms in times])
    given = Constraints(pipeline_ranks=2, waves=waves, loops=())
    found = tuned(costs, box(1, 2), 16, given=given)
    assert {trial.choice.waves for trial in found.trials} == tried
    assert found.best.choice.waves == (3 if 3 in tried else 2 if 2 in tried else 1)


def test_what_is_too_slow_without_regard_to_memory_is_not_planned_within_it():
    """A limit makes nothing faster; the reason says what the choice would make without it."""
    costs, cluster = uniform(8, activation_bytes=100), box(1, 4, memory_bytes=800, intra=2e-4)
    found = tuned(costs, cluster, 16, given=Constraints(loops=()))
    said = [trial for trial in found.trials if "without regard to memory" in trial.reason]
    assert said
    for trial in said:
        choice, speed = trial.choice, trial.samples_per_second
        assert speed < found.best.figures.samples_per_second
        alone = Constraints(pipeline_ranks=choice.pipeline_ranks, waves=(choice.waves,), loops=(), zero_stage=0)
        alone = replace(alone, microbatch_size=choice.microbatch_size)
        planned = tuned(costs, cluster, 16, given=alone).best.figures.samples_per_second
        assert planned <= speed


def test_loops_that_are_settled_are_all_that_are_tried():
    given = Constraints(waves=(0, 1), loops=(2,))
    found = tuned(uniform(12, activation_bytes=100), box(1, 2, memory_bytes=700), 8, given=given)
    assert {trial.choice.waves for trial in found.trials if trial.choice.loop} == {2}


def test_cuts_of_two_waves_are_those_of_the_first_microbatch_size():
    """Finding them takes seconds: once for so many ranks and pipelines, though other sizes might be cut elsewhere."""
    one = profile([layer(forward_ms=ms, backward_ms=2 * ms) for ms in (1, 1, 1, 1, 1, 1, 1, 1, 9, 1)])
    two = profile(
        [layer(forward_ms=ms, backward_ms=2 * ms) for ms in (9, 1, 1, 1, 1, 1, 1, 1, 1, 1)], microbatch_size=2
    )
    settled = Constraints(pipeline_ranks=2, waves=(1, 2), loops=())
    found = tuned([one, two], box(1, 2), 4, given=settled, exhaustive=True)
    cuts = {(t.choice.waves, t.choice.microbatch_size): t.planned.boundaries for t in found.ranked}
    assert cuts[1, 1] != cuts[1, 2]
    assert cuts[2, 1] == cuts[2, 2]


def test_layers_are_recomputed_where_that_is_the_only_way():
    costs = uniform(4, activation_bytes=100, output_bytes=1)
    found = tuned(costs, box(ranks_per_node=1, memory_bytes=250), 4)
    assert found.best.planned.recompute
    assert max(found.best.planned.estimate.peak_bytes) <= 250


def test_linear_placement_is_chosen_where_it_is_faster():
    """One layer has nearly all the work: a second stage on its rank is only a burden."""
    layers = [layer(output_bytes=10**6)] * 3 + [layer(30, 60, output_bytes=10**6, param_bytes=10**8)]
    found = tuned(profile(layers), box(ranks_per_node=2, intra=0.01), 4)
    assert (found.best.choice.pipeline_ranks, found.best.choice.waves) == (2, 0)


def test_a_loop_is_chosen_where_it_is_faster():
    """Four microbatches on four ranks: with four stages a rank fill and drain are a quarter of one stage's."""
    settled = Constraints(pipeline_ranks=4, microbatch_size=1)
    best = tuned(uniform(16), box(), 4, given=settled).best
    assert best.choice.waves == 2
    loops = tuned(uniform(16), box(), 4, given=replace(settled, waves=())).best
    assert loops.choice.placement == loops.planned.placement == Placement.loop(4, 4)
    assert best.figures.step_ms <= loops.figures.step_ms


@pytest.mark.parametrize("heavy", ["weights", "activations"])
def test_the_layout_follows_what_is_heavy(heavy):
    """Slow links between nodes: whatever sends more stays inside. Memory asks for P=2."""
    weights, sent = (10**6, 1) if heavy == "weights" else (10**3, 10**6)
    costs = uniform(8, param_bytes=weights, output_bytes=sent, activation_bytes=0)
    memory = 5 * 8 * weights // 2 + 2 * 16 * sent
    found = tuned(costs, box(2, 2, memory, intra=10, inter=0.1), 16, exhaustive=True)
    halves = [trial for trial in found.ranked if trial.choice.pipeline_ranks == 2]
    expected = Layout.PIPE_MAJOR if heavy == "weights" else Layout.DATA_MAJOR
    assert halves[0].choice.layout is expected
    assert halves[0].planned.layout is expected
    assert {trial.choice.layout for trial in halves} == set(Layout)


def test_a_search_makes_the_best_no_worse():
    costs = random_profile(random.Random(3), 12)
    heavy = replace(costs, layers=tuple(replace(x, param_bytes=10**6) for x in costs.layers))
    cluster = box(intra=1e-2)
    plain, searched = (tuned(heavy, cluster, 8, solver_seconds=seconds) for seconds in (0, 3))
    assert searched.best.planned.estimate.step_ms <= plain.best.planned.estimate.step_ms
    assert searched.best.planned.solver.generator is not None


@pytest.mark.parametrize(("layers", "seconds"), [(uniform(8), 9.0), (random_profile(random.Random(3), 12), 0.0)])
def test_nothing_is_searched_without_time_or_where_nothing_can_be_better(layers, seconds, monkeypatch):
    """No bubble: no order is shorter than the one that is known."""
    monkeypatch.setattr("deepspeed_pulse.planner.tuning.tuner.ordered", lambda *a: pytest.fail("searched"))
    assert tuned(layers, box(), 16, solver_seconds=seconds).best.plan is not None


@pytest.mark.parametrize(("split", "searched"), [(None, 1), (False, 0)])
def test_whole_backwards_at_their_bound_are_searched_where_halves_may_be(split, searched, monkeypatch):
    """Those take 6 ms in any order, and with the halves of the generators, too."""
    asked = []
    monkeypatch.setattr("deepspeed_pulse.planner.tuning.tuner.ordered", lambda plan, *a: asked.append(plan) or plan)
    costs = uniform(2, weight_grad_ms=1.0, input_grad_ms=2.0)
    given = Constraints(pipeline_ranks=2, waves=(0,), loops=(), split_backward=split)
    assert tuned(costs, box(1, 2), 1, given=given, solver_seconds=1).best.figures.step_ms == 6
    assert len(asked) == searched


def test_a_choice_that_only_search_makes_the_best_is_searched(monkeypatch):
    """The order of one wave is at its bound; two waves, as they are cut first, are better, but in no known order."""
    monkeypatch.setattr("deepspeed_pulse.planner.tuning.tuner.rival", lambda *a: None)
    costs = profile([layer(forward_ms=ms, backward_ms=2 * ms) for ms in (3, 2, 1, 1, 1, 1, 1, 1, 1)])
    settled = Constraints(pipeline_ranks=2, microbatch_size=1, loops=())
    plain, searched = (tuned(costs, box(1, 2), 2, given=settled, solver_seconds=seconds).best for seconds in (0, 3))
    assert plain.choice.waves == 1
    assert plain.planned.estimate.step_ms == plain.planned.estimate.lower_bound_ms == 46
    assert searched.choice.waves == 2
    assert searched.planned.estimate.step_ms == 45


def test_several_waves_and_loops_get_cuts_that_count_fill():
    """The partitioner balances work alone, which costs the most where microbatches are few."""
    costs = random_profile(random.Random(5), 16)
    settled = Constraints(pipeline_ranks=4, microbatch_size=1)
    trials = tuned(costs, box(), 4, given=settled, solver_seconds=0).trials
    for trial in [t for t in trials if t.plan and (t.choice.waves > 1 or t.choice.loop)][:3]:
        shape = SearchOptions(
            placement="loop" if trial.choice.loop else "wave",
            waves=trial.choice.waves,
            part_skips=True,
            solver_seconds=0,
        )
        alone = make_plan(OpenJob(profiles=[costs], cluster=box(), global_batch=4).chosen(trial.choice), shape)
        assert trial.figures.step_ms <= alone.figures.step_ms * (1 + 1e-9)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_choice_is_planned_under_its_own_rules(zero_stage):
    """ZeRO-1 sums after the last action, so its best cuts and orders are others than those of early sums."""
    rng = random.Random(zero_stage)
    drawn = random_profile(rng, 12)
    heavy = replace(drawn, layers=tuple(replace(x, param_bytes=rng.randrange(10**6)) for x in drawn.layers))
    costs = replace(heavy, dtype="bfloat16")
    settled = Constraints(pipeline_ranks=2, microbatch_size=1, waves=(1,), loops=(), zero_stage=zero_stage)
    best = tuned(costs, box(intra=1e-2), 8, given=settled, solver_seconds=0).best
    assert best.planned.rules == Rules.of(zero_stage)
    job = OpenJob(profiles=[costs], cluster=box(intra=1e-2), global_batch=8, given=settled).chosen(best.choice)
    alone = make_plan(job, SearchOptions(placement="wave", part_skips=True, solver_seconds=0))
    assert best.figures.step_ms <= alone.figures.step_ms * (1 + 1e-9)


def test_where_a_port_is_all_there_is_every_zero_stage_is_planned():
    """Early sums leave by the port that the last messages leave by."""
    rng = random.Random(8)
    costs = profile(
        [layer(rng.uniform(1, 3), rng.uniform(2, 6), rng.randrange(10**8), 1, 10**7) for _ in range(8)],
        dtype="bfloat16",
    )
    link = Link(bandwidth_gb_per_s=10.0, latency_us=10.0, one_port=True)
    ported = Cluster(name="ported", nodes=1, ranks_per_node=4, memory_bytes=10**15, intra_node=link, inter_node=link)
    found = tuned(costs, ported, 8, given=Constraints(pipeline_ranks=2, loops=()), solver_seconds=0).trials
    planned = {trial.choice.zero_stage for trial in found if trial.plan}
    assert planned == {0, 1} and Verdict.NO_GAIN not in {trial.verdict for trial in found}


def test_where_stage_0_gathers_weights_every_zero_stage_is_planned():
    """DeepSpeed's bf16: 40 ms to sum all gradients, the first layer's behind the backward, and 20 to gather weights.

    ZeRO-1 scatters gradients instead, in 20.
    """
    costs = profile([layer(param_bytes=10**8) for _ in range(4)], dtype="bfloat16")
    found = tuned(costs, box(1, 2, intra=10), 2, given=Constraints(pipeline_ranks=1, waves=(0,), microbatch_size=1))
    steps = {trial.choice.zero_stage: trial.figures.step_ms for trial in found.ranked}
    assert steps == pytest.approx({0: 66, 1: 52})
    assert found.best.choice.zero_stage == 1


# -- what the user has settled -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settled", "expected"),
    [
        ({"pipeline_ranks": 4}, {"pipeline_ranks": {4}, "waves": {0, 1, 2}}),
        ({"pipeline_ranks": 2, "microbatches": 4}, {"microbatch_size": {2}, "data_parallel": {2}}),
        ({"microbatch_size": 8}, {"microbatch_size": {8}, "pipeline_ranks": {2, 4}}),
        ({"waves": (1,), "loops": ()}, {"waves": {1}, "loop": {False}, "pipeline_ranks": {1, 2, 4}}),
        ({"waves": (), "loops": (1,)}, {"waves": {1}, "loop": {True}, "pipeline_ranks": {1, 2, 4}}),
        ({"schedule": "interleaved", "pipeline_ranks": 2}, {"waves": {1, 2}, "loop": {True}}),
        ({"schedule": "1f1b"}, {"waves": {0}}),
        ({"zero_stage": 1, "pipeline_ranks": 2}, {"zero_stage": {1}}),
        pytest.param({"zero_stage": 1}, {"zero_stage": {1}}, marks=pytest.mark.soak),
        ({"recompute": (0, 1), "pipeline_ranks": 2}, {}),
        pytest.param({"recompute": (0, 1)}, {}, marks=pytest.mark.soak),
    ],
)
def test_what_is_given_is_kept(settled, expected):
    found = tuned(uniform(16, activation_bytes=10), box(), 16, given=Constraints(**settled), exhaustive=True)
    for name, values in expected.items():
        assert {getattr(trial.choice, name) for trial in found.trials} == values
    assert {trial.planned.recompute for trial in found.ranked} == {settled.get("recompute", ())}


def test_what_is_given_limits_what_would_do():
    """Without a shared optimizer and other microbatches more memory is needed."""
    costs = uniform(8, param_bytes=10**6, activation_bytes=10**6, output_bytes=10**5)
    settled = Constraints(zero_stage=0, microbatches=1, pipeline_ranks=1)
    with pytest.raises(
        InfeasibleError, match=r"on 2 ranks, layers recomputed: 0.0[0-9]+ GB a rank would do"
    ) as problem:
        tuned(costs, box(1, 2, 11 * 10**6), 4, given=settled)
    assert tuned(costs, box(1, 2, problem.value.needed_bytes), 4, given=settled).ranked


# -- microbatch sizes ----------------------------------------------------------------------------


def test_larger_microbatches_are_scaled_and_say_so():
    costs = profile(
        [layer(1, 2, 7, 5, 3, weight_grad_ms=1.5, input_grad_ms=1.0, workspace_bytes=2)] * 2,
        [skip("a", 0, 1, 11)],
        microbatch_size=2,
    )
    found = scaled(costs, 6)
    assert found.layers[0] == layer(3, 6, 7, 15, 9, weight_grad_ms=4.5, input_grad_ms=3.0, workspace_bytes=6)
    assert (found.skips[0].bytes, found.microbatch_size) == (33, 6)
    assert found.device == "none, scaled from microbatches of 2"
    assert Sizes([costs]).dividing(24) == (2, 4, 6, 8, 12, 24)
    assert Sizes([costs]).dividing(9) == ()
    assert Sizes([costs]).at(2) is costs


def test_given_sizes_are_taken_as_they_are():
    """A device that is much faster per sample with four is used with four."""
    one, four = uniform(4), replace(uniform(4, forward_ms=2, backward_ms=4), microbatch_size=4)
    assert Sizes([four, one]).dividing(100) == (1, 4)
    assert Sizes([four, one]).dividing(102) == (1,)
    best = tuned([one, four], box(ranks_per_node=2), 16).best
    assert (best.choice.microbatch_size, best.planned.microbatch_size) == (4, 4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (uniform(5), "differ in number of layers: 4 and 5"),
        (replace(uniform(4), dtype="bfloat16"), "differ in dtype: float32 and bfloat16"),
        (uniform(4, param_bytes=1), "differ in layers' parameters"),
        (profile(uniform(4).layers, [skip("a", 0, 1)]), "differ in named values"),
        (uniform(4), "expected one for each microbatch size, found sizes 1, 1"),
    ],
)
def test_profiles_of_different_models_are_refused(other, message):
    with pytest.raises(ConfigError, match=message):
        Sizes([uniform(4), other])


# -- bad input -----------------------------------------------------------------------------------


def test_what_fits_nowhere_says_what_would_do():
    """Both figures are true, and a little less memory is not enough."""
    costs = uniform(8, param_bytes=10**6, activation_bytes=10**6, output_bytes=10**5)
    with pytest.raises(InfeasibleError, match=r"nothing fits 0.011 GB a rank on 2 ranks") as problem:
        tuned(costs, box(1, 2, 11 * 10**6), 4)
    needed = problem.value.needed_bytes
    assert f"{needed / 1e9:.3f} GB a rank would do or 4 ranks would do" in str(problem.value)
    assert tuned(costs, box(1, 2, needed), 4).ranked
    with pytest.raises(InfeasibleError):
        tuned(costs, box(1, 2, int(0.95 * needed)), 4)
    assert tuned(costs, box(2, 2, 11 * 10**6), 4).ranked


def test_sixty_four_times_the_ranks_are_tried():
    """A layer a rank: 4 MB of state, 1 MB to step."""
    costs = uniform(64, param_bytes=10**6, activation_bytes=0)
    with pytest.raises(InfeasibleError, match=" or 64 ranks would do"):
        tuned(costs, box(1, 1, 5 * 10**6), 1)


def test_a_global_batch_that_nothing_divides():
    costs = replace(uniform(8), microbatch_size=4)
    with pytest.raises(ConfigError, match=r"global batch: 6 samples .* microbatches of 4; use 4 or 8, or profile"):
        tuned(costs, box(), 6)
    with pytest.raises(ConfigError, match="use 4, or profile"):
        tuned(costs, box(), 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "zbv", "waves": (0,), "loops": ()}, "schedule 'zbv' fits no placement that is tried .linear. on"),
        (
            {"schedule": "1f1b", "waves": (1, 2), "loops": ()},
            "schedule '1f1b' fits no placement that is tried .wave. on",
        ),
        ({"microbatch_size": 3}, "microbatch size: expected one that a profile is for, found 3: there is one for 2"),
    ],
)
def test_what_excludes_every_choice_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        tuned(replace(uniform(8), microbatch_size=2), box(), 12, given=Constraints(**given))


def test_a_batch_that_only_too_many_stages_divide():
    with pytest.raises(InfeasibleError, match="7 samples a step on 8 ranks; too few layers: 16 stages"):
        tuned(uniform(4), box(ranks_per_node=8), 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 9}, "world size: 9 ranks, the cluster 'box' has 4"),
        ({"world_size": 0}, "world size: expected an integer >= 1, found 0"),
        ({"global_batch": True}, "global batch: expected an integer >= 1, found True"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ConfigError, match=message):
        tune(OpenJob(profiles=[uniform(4)], cluster=box(), **{"global_batch": 8, **options}))


# -- DeepSpeed's settings ------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "precision"), [("float32", None), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_the_config_runs_the_choice(dtype, precision):
    costs = replace(uniform(8, param_bytes=10**6), dtype=dtype)
    choice = tuned(costs, box(), 16).best.choice
    config = choice.ds_config(costs, "plan.json")
    steps = config["gradient_accumulation_steps"] * config["train_micro_batch_size_per_gpu"]
    assert config["train_batch_size"] == 16 == steps * choice.data_parallel
    assert [key for key in ("bf16", "fp16") if key in config] == ([precision] if precision else [])
    assert parse_pulse(config["pulse"]).plan == "plan.json"


def test_a_batch_that_would_do_is_named_with_what_is_settled():
    costs = replace(uniform(8), microbatch_size=4)
    with pytest.raises(ConfigError, match=r"global batch: 24 samples .* use 16 or 32, or profile"):
        tuned(costs, box(), 24, given=Constraints(pipeline_ranks=1))
    with pytest.raises(ConfigError, match=r"global batch: 24 samples .* use 32, or profile"):
        tuned(costs, box(), 24, given=Constraints(pipeline_ranks=2, microbatches=4))


def test_memory_that_would_do_is_of_microbatches_that_the_batch_has():
    """Pairs are no whole number of nine samples."""
    costs = uniform(8, param_bytes=10**6)
    sizes = [replace(costs, microbatch_size=2), replace(costs, microbatch_size=3)]
    with pytest.raises(InfeasibleError, match=r"GB a rank would do"):
        tuned(sizes, box(ranks_per_node=1, memory_bytes=25 * 10**6), 9)


def test_an_unknown_schedule_is_named():
    with pytest.raises(ConfigError, match=r"schedule 'zvb' is not available .did you mean \"zbv\".*; available:"):
        tuned(uniform(8), box(), 8, given=Constraints(schedule="zvb"))
