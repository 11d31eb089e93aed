"""Several backbones in one plan: figures known beforehand, never slower than one after the other, within memory."""

import itertools
import random
from dataclasses import replace

import pytest
from toys import cluster, layer, profile, random_profile, uniform

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.carried import Part, carried_actions, fill_of, program_of
from deepspeed_pulse.ir.choice import Constraints
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.conditioning import SelfConditioned
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.joined import joined_profile
from deepspeed_pulse.ir.keys import key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import lower
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, estimate, make_plan, tune, violations
from deepspeed_pulse.planner.ideal import ideal_ms
from deepspeed_pulse.planner.making.maker import Maker
from deepspeed_pulse.planner.making.rolled import with_own_steps
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import count_cap
from deepspeed_pulse.planner.schedules.listing import Prefer, list_schedule
from deepspeed_pulse.planner.schedules.templates import peak_in_flight
from deepspeed_pulse.planner.simulator import simulate

QUICK = SearchOptions(solver_seconds=0.0)
"""Generators only: the same figures on every machine."""


def several(ranks, *works, **costs):
    """Backbones whose half-stages take so many times 1 forward and 2 backward, one layer a stage of a wave."""
    parts = [
        uniform(
            2 * ranks,
            **({"forward_ms": work, "backward_ms": 2 * work, "weight_grad_ms": work, "input_grad_ms": work} | costs),
        )
        for work in works
    ]
    return joined_profile(parts, [f"model{at}" for at in range(len(works))])


def directed(ranks, reversed_ones):
    wave = Placement.wave(ranks)
    return Placement.of_backbones([wave.mirrored if back else wave for back in reversed_ones])


def planned(
    ranks, microbatches, works, reversed_ones, *, split=False, memory_bytes=None, seconds=0.0, steps="together"
):
    costs = several(ranks, *works)
    job = Job(
        profile=costs,
        cluster=cluster(ranks=ranks),
        pipeline_ranks=ranks,
        microbatches=microbatches,
        memory_bytes=memory_bytes,
    )
    options = SearchOptions(placement="wave", split_backward=split, solver_seconds=seconds, backbone_steps=steps)
    found = Maker(job=job, options=options).plan(directed(ranks, reversed_ones))
    assert violations(found, num_layers=costs.num_layers, values=costs.values) == []
    return found


@pytest.mark.parametrize(
    ("ranks", "microbatches", "same", "opposite", "split"),
    [
        (4, 4, 57, 51, 49),
        (4, 8, 105, 99, 97),
        pytest.param(8, 8, 117, 105, 99, marks=pytest.mark.soak),
        pytest.param(8, 16, 213, 201, 195, marks=pytest.mark.soak),
    ],
)
def test_two_equal_waves_take_the_shortest_time_there_is(ranks, microbatches, same, opposite, split):
    """W + (P-1)(f+b); opposite W + (P/2-1)(f+b), with split backward W + (P/2-1)."""
    work = 12 * microbatches
    assert (same, opposite, split) == (work + 3 * (ranks - 1), work + 3 * (ranks // 2 - 1), work + ranks // 2 - 1)
    found = [
        planned(ranks, microbatches, (1, 1), way, split=halves)
        for way, halves in (((0, 0), False), ((0, 1), False), ((0, 1), True))
    ]
    assert [one.estimate.makespan_ms for one in found] == [same, opposite, split]
    assert [one.solver.optimal for one in found] == [True, True, True]
    assert found[-1].estimate.gap == 0


@pytest.mark.parametrize(
    ("ranks", "microbatches", "after", "halved", "linear"),
    [(4, 4, 72, 54, 54), (4, 8, 114, 102, 102), (8, 8, 152, 114, 114), (8, 16, 234, 210, 210)],
)
def test_what_two_waves_beside_each_other_are_compared_with(ranks, microbatches, after, halved, linear):
    """One after the other, each on half the ranks (stages of equal work), and linear in opposite directions."""

    def step_ms(count, place, costs, **more):
        job = Job(profile=costs, cluster=cluster(ranks=count), pipeline_ranks=count, microbatches=microbatches)
        options = replace(QUICK, split_backward=False, **more)
        return Maker(job=job, options=options).plan(place).estimate.makespan_ms

    both, line = several(ranks, 1, 1), Placement.linear(ranks)
    equal = tuple(range(0, 2 * ranks + 1, 2))
    assert 2 * step_ms(ranks, Placement.wave(ranks), both.part(0)) == after
    assert step_ms(ranks // 2, Placement.wave(ranks // 2), both.part(0), boundaries=equal) == halved
    assert step_ms(ranks, Placement.of_backbones([line, line.mirrored]), both) == linear


@pytest.mark.parametrize(("ways", "expected"), [((0, 0, 0), 153), ((0, 1, 0), 147), ((0, 0, 1), 147), ((0, 1, 1), 147)])
def test_three_backbones_gain_by_one_that_is_reversed(ways, expected):
    assert planned(4, 8, (1, 1, 1), ways).estimate.makespan_ms == expected


@pytest.mark.parametrize("works", [(1, 2), pytest.param((1, 4), marks=pytest.mark.soak), (2, 1)])
@pytest.mark.parametrize("memory_bytes", [None, pytest.param(8, marks=pytest.mark.soak), 4, 2])
def test_no_plan_is_slower_than_one_backbone_after_the_other(works, memory_bytes):
    """Down to room for one microbatch of one backbone, where nothing else is left."""
    costs = several(4, *works)
    job = Job(profile=costs, cluster=cluster(ranks=4), pipeline_ranks=4, microbatches=4, memory_bytes=memory_bytes)
    plan = make_plan(job, replace(QUICK, placement="wave", split_backward=False))
    alone = [
        make_plan(replace(job, profile=costs.part(at)), replace(QUICK, placement="wave", split_backward=False))
        for at in range(2)
    ]
    assert plan.estimate.makespan_ms <= sum(one.estimate.makespan_ms for one in alone)
    assert memory_bytes is None or max(plan.estimate.peak_bytes) <= memory_bytes


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("works", "most"), [((1, 2), 85), ((1, 4), 156)])
def test_unequal_backbones_share_two_stashes_a_rank(works, most):
    """Each layer of these keeps one byte. Neither direction is always the better one, so both are tried."""
    found = [planned(4, 4, works, ways, memory_bytes=8, seconds=40) for ways in ((0, 0), (0, 1))]
    assert min(one.estimate.makespan_ms for one in found) <= most
    assert all(max(one.estimate.peak_bytes) <= 8 for one in found)


@pytest.mark.parametrize("seed", range(12))
def test_backbones_beside_each_other_never_wait_for_room_that_another_took(seed):
    """Any weights, directions and times: a cap that lets one microbatch of each through is enough."""
    rng = random.Random(seed)
    ranks, count = rng.choice([2, 3, 4]), rng.choice([2, 3])
    place = Placement.of_backbones(
        [rng.choice([one, one.mirrored]) for one in (Placement.wave(ranks) for _ in range(count))]
    )
    parts = [random_profile(rng, 2 * ranks) for _ in range(count)]
    costs = joined_profile(parts, [f"model{at}" for at in range(count)])
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=ranks, microbatches=5)
    one_a_stage = replace(QUICK, boundaries=tuple(range(len(place) + 1)))
    problem = Problem(Maker(job=job, options=one_a_stage).cut(place, costs), costs, cluster())
    weights = tuple(rng.uniform(0.1, 4) for _ in place)
    needs = [sum(weights[stage] for stage in place.stages_of(rank)) for rank in range(ranks)]
    cap = replace(count_cap(problem, 1), weights=weights, limits=tuple(rng.uniform(1, 1.5) * need for need in needs))
    rows = list_schedule(
        problem, 5, cap=cap, split=rng.random() < 0.5, prefer=rng.choice([Prefer.FORWARD, by_microbatch])
    )
    live = [max_live(row, weights) for row in rows]
    assert all(most <= limit + 1e-6 for most, limit in zip(live, cap.limits, strict=True))


def by_microbatch(action):
    return (action.microbatch,)


def max_live(row, weights):
    live = most = 0.0
    last = "W" if any(action.op.value == "W" for action in row) else "B"
    for action in row:
        live += {"F": 1, last: -1}.get(action.op.value, 0) * weights[action.stage]
        most = max(most, live)
    return most


def test_one_cap_of_all_that_lets_only_one_through_is_said():
    costs = several(2, 1, 1)
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=3)
    problem = Problem(Maker(job=job, options=QUICK).cut(directed(2, (0, 1)), costs), costs, cluster())
    with pytest.raises(InfeasibleError, match="rank 0 needs 4 stages in flight, its limit is 3"):
        list_schedule(problem, 3, cap=count_cap(problem, 3))
    assert peak_in_flight(list_schedule(problem, 3, cap=count_cap(problem, 4))) <= 4


def test_joint_cuts_are_more_even_than_each_backbone_s_own():
    """Layers of 3 and 5 ms do not go evenly into a rank's stages; beside those of the other backbone they do better."""
    rng = random.Random(3)
    parts = [profile([layer(t := rng.uniform(1, 5), 2 * t) for _ in range(14)]) for _ in range(2)]
    costs = joined_profile(parts, ["a", "b"])
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=4, microbatches=4)
    place = directed(4, (0, 1))
    maker = Maker(job=job, options=QUICK)
    joint = loads(maker.cut(place, costs).boundaries, costs, place)
    own = [
        Maker(job=replace(job, profile=costs.part(at)), options=QUICK).cut(Placement.wave(4), costs.part(at)).boundaries
        for at in range(2)
    ]
    apart = loads((*own[0][:-1], *(14 + cut for cut in own[1])), costs, place)
    assert max(joint) < max(apart)


def loads(cuts, costs, place):
    found = [0.0] * place.num_ranks
    for stage, (first, end) in enumerate(itertools.pairwise(cuts)):
        found[place[stage]] += sum(one.forward_ms + one.backward_ms for one in costs.layers[first:end])
    return found


def each_planned(*args, split=True, memory_bytes=None):
    """With steps of their own: every trial, and no search for the order that they replace."""
    return planned(*args, split=split, memory_bytes=memory_bytes, seconds=1e-9, steps="each")


@pytest.mark.parametrize("ways", [(0, 0), (0, 1)])
@pytest.mark.parametrize("microbatches", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_steps_of_their_own_leave_no_bubble_within_two_stashes_a_rank(microbatches, ways):
    """Period W, in steady state, under the cap of 2P stashes; each layer of these keeps one byte."""
    found = each_planned(4, microbatches, (1, 1), ways, memory_bytes=8)
    assert found.estimate.makespan_ms == 12 * microbatches
    assert found.estimate.bubble_ratio == 0 and max(found.estimate.peak_bytes) <= 8
    assert simulated_chain(found, 5) == 12 * microbatches
    assert carried_actions(found)


def simulated_chain(plan, steps):
    """Mean ms from the end of a step to the next, of so many, each rank going on as soon as it can."""
    late, free, given = carried_actions(plan), [0.0] * plan.pipeline_ranks, {}
    costs = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    ends = []
    program, whole = program_of(plan), {step.action: step for row in lower(plan) for step in row}
    for step in range(steps):
        rows = [list(row) for row in program]
        while any(rows):
            moved = False
            for rank, row in enumerate(rows):
                while row:
                    action = row[0].action
                    if action.op.value == "L":
                        row.pop(0)
                        moved = True
                        continue
                    mine = step - (action in late)
                    keys = [(mine, key) for key in whole[action].needs]
                    if mine < 0:
                        row.pop(0)
                        moved = True
                        continue
                    if any(key not in given for key in keys):
                        break
                    start = max([free[rank], *(given[key] for key in keys)])
                    free[rank] = given[mine, key_of(action)] = start + costs[action.op.value]
                    row.pop(0)
                    moved = True
            assert moved
        ends.append(max(free))
    return (ends[-1] - ends[1]) / (steps - 2)


def test_auto_takes_own_steps_only_where_they_are_faster():
    costs = several(4, 1, 1)
    job = Job(profile=costs, cluster=cluster(ranks=4), pipeline_ranks=4, microbatches=4)
    auto = make_plan(job, replace(QUICK, placement="wave", backbone_steps="auto"))
    assert auto.estimate.makespan_ms == 48 and carried_actions(auto)
    alone = replace(job, pipeline_ranks=1, cluster=cluster())
    assert not carried_actions(make_plan(alone, replace(QUICK, backbone_steps="auto")))


@pytest.mark.parametrize("recompute", ["auto", "none", "all"])
def test_no_cut_is_moved_across_the_end_of_a_backbone(recompute):
    """Uneven ones: a layer more or less for one of them would balance the ranks."""
    parts = [random_profile(random.Random(count), count) for count in (6, 9)]
    costs = joined_profile(parts, ["base", "upper"])
    job = Job(profile=costs, cluster=cluster(ranks=2), pipeline_ranks=2, microbatches=3, recompute=recompute)
    for placement in ("wave", "linear"):
        assert 6 in make_plan(job, replace(QUICK, placement=placement)).boundaries


def test_own_steps_that_cannot_be_are_refused():
    job = Job(profile=uniform(8), cluster=cluster(ranks=4), pipeline_ranks=4, microbatches=4)
    with pytest.raises(ConfigError, match="expected several backbones, found one"):
        make_plan(job, replace(QUICK, backbone_steps="each"))
    both = replace(job, profile=several(4, 1, 1))
    tight = replace(both, memory_bytes=1)
    plan = make_plan(both, replace(QUICK, placement="wave"))
    with pytest.raises(InfeasibleError, match='"each": no such order fits the memory; use "together"'):
        with_own_steps(plan, tight, replace(QUICK, backbone_steps="each"))
    assert with_own_steps(plan, tight, replace(QUICK, backbone_steps="auto")) is plan


@pytest.mark.parametrize("ways", [(0, 0), (0, 1)])
def test_extra_forwards_run_within_steps_of_their_own(ways):
    """Those of microbatches that are carried run with them or before; the period is near all work there is."""
    costs = several(4, 1, 1)
    one = SelfConditioned(entry="estimate", layers=(8, 15), probability=0.5)
    job = Job(profile=costs, cluster=cluster(ranks=4), pipeline_ranks=4, microbatches=4, conditioning=(one,))
    options = replace(QUICK, placement="wave", split_backward=True, backbone_steps="each")
    found = Maker(job=job, options=options).plan(directed(4, ways))
    assert carried_actions(found) and violations(found, num_layers=costs.num_layers, values=costs.values) == []
    assert found.estimate.lower_bound_ms == 48 + 4
    assert found.estimate.makespan_ms <= 1.1 * found.estimate.lower_bound_ms
    assert found.estimate == estimate(found, costs, job.cluster)


def test_sums_of_steps_of_their_own_are_counted_behind_the_rows():
    """The engine makes none of them while backwards run."""
    links = cluster(Link(bandwidth_gb_per_s=1.0, latency_us=0.0))
    costs = several(4, 1, 1, param_bytes=10**6)
    job = Job(profile=costs, cluster=links, pipeline_ranks=4, microbatches=4, data_parallel=2)
    found = make_plan(job, replace(QUICK, placement="wave", split_backward=True, backbone_steps="each"))
    timeline = simulate(found, costs, links)
    assert carried_actions(found) and timeline.reductions
    for sum_ in timeline.reductions:
        assert sum_.start_ms >= max(span.end_ms for span in timeline.spans_of(sum_.rank))


def test_an_optimizers_step_of_one_backbone_is_beside_what_is_live():
    """Steps of their own are made while others' activations are there, one backbone's at a time; a joint one after."""
    costs = several(4, 1, 1, param_bytes=100)
    job = Job(profile=costs, cluster=cluster(ranks=4), pipeline_ranks=4, microbatches=4)
    options = replace(QUICK, placement="wave", split_backward=True)
    apart, joint = (make_plan(job, replace(options, backbone_steps=steps)) for steps in ("each", "together"))
    assert carried_actions(apart) and not carried_actions(joint)
    for plan in (apart, joint):
        live = [max(held for _, held in row) for row in simulate(plan, costs, job.cluster).memory]
        for rank, peak in enumerate(plan.estimate.peak_bytes):
            layers = [sum(map(len, map(plan.stage_layers, part))) for part in stages_by_backbone(plan, rank)]
            state = 4 * 100 * sum(layers)
            assert peak == state + (
                live[rank] + 100 * max(layers) if plan is apart else max(live[rank], 100 * sum(layers))
            )


def stages_by_backbone(plan, rank):
    owners = {stage: plan.placement.backbone_of(stage) for stage in plan.stages_of(rank)}
    return [[stage for stage in owners if owners[stage] == owner] for owner in sorted(set(owners.values()))]


@pytest.mark.parametrize(("steps", "dtype"), [("each", "float32"), ("auto", "bfloat16")])
def test_steps_of_their_own_are_tuned_within_their_bounds(steps, dtype):
    costs = replace(several(2, 1, 3), dtype=dtype)
    given = Constraints(backbone_steps=steps, pipeline_ranks=2, waves=(1,), loops=())
    job = OpenJob(profiles=[costs], cluster=cluster(ranks=4), global_batch=4, given=given)
    found = tune(job, solver_seconds=0, exhaustive=True)
    assert tune(job, solver_seconds=0).best.samples_per_second == found.best.samples_per_second
    assert carried_actions(found.best.planned)
    for trial in found.trials:
        choice = trial.choice
        if trial.plan is not None:
            least = ideal_ms(costs, choice.placement, choice.microbatches, split=True, apart=True)
            assert trial.plan.estimate.step_ms >= least
    config = replace(found.best.choice, zero_stage=1).ds_config(costs, "plan.json", apart=True)
    assert config["pulse"]["backbone_steps"] == "each"
    halves = replace(job, profiles=[replace(costs, dtype="float16")])
    if steps == "auto":
        assert not carried_actions(tune(halves, solver_seconds=0).best.planned)
        return
    with pytest.raises(ConfigError, match="expected profiles in float32 or bfloat16, found float16"):
        tune(halves, solver_seconds=0)


def encoder(name, *ms, targets, size=1):
    layers = tuple(
        FrozenLayer(name=str(at), forward_ms=time, param_bytes=1, output_bytes=size, activation_bytes=2 * size)
        for at, time in enumerate(ms)
    )
    return FrozenPart(name=name, layers=layers, targets=targets)


@pytest.mark.parametrize("ways", [(0, 0), (0, 1)])
def test_encoders_run_at_the_ends_of_rows_that_run_into_one_another(ways):
    """As much of them on each rank, behind all places where ranks meet; nothing is longer than all work there is."""
    costs, parts = several(4, 1, 1), (encoder("one", 0.5, 0.5, targets=(0, 5)), encoder("two", 1.0, targets=(9,)))
    job = Job(profile=costs, cluster=cluster(ranks=4), pipeline_ranks=4, microbatches=4, memory_bytes=60, frozen=parts)
    options = SearchOptions(placement="wave", split_backward=True, solver_seconds=1e-9, backbone_steps="each")
    found = Maker(job=job, options=options).plan(directed(4, ways))
    values = costs.values
    assert carried_actions(found) and violations(found, num_layers=costs.num_layers, values=values) == []
    assert found.estimate.makespan_ms == found.estimate.lower_bound_ms == 48 + 2 and found.solver.optimal
    assert max(found.estimate.peak_bytes) <= 60 and found.estimate == estimate(found, costs, job.cluster)
    assert Plan.from_json(found.to_json()) == found
    first, counts = fill_of(found, Part.FIRST), [len(row) for row in program_of(found, Part.FIRST)]
    assert all(f.position <= count for row, count in zip(first.rows, counts, strict=True) for f in row)
    assert {f.position for f in found.fill.rows[0]} == {len(found.schedule[0])}
    rows = list(found.fill.rows)
    rows[0] = tuple(replace(filling, position=0) for filling in rows[0])
    early = replace(found, fill=replace(found.fill, rows=tuple(rows)))
    lines = violations(early, num_layers=costs.num_layers, values=values)
    assert any("before all ranks have ended the step of backbone" in line for line in lines), lines


def test_what_is_carried_must_leave_nothing_behind():
    """A step that needs what the next one runs, or a backbone that begins before it has ended elsewhere."""
    plan = each_planned(4, 4, (1, 1), (0, 1))
    values, layers = several(4, 1, 1).values, plan.num_layers
    moved = next(at for at, part in enumerate(plan.backbones) if part.carried)
    fewer = tuple(max(0, count - 5 * (rank == 0)) for rank, count in enumerate(plan.backbones[moved].carried))
    parts = list(plan.backbones)
    parts[moved] = replace(parts[moved], carried=fewer)
    assert violations(replace(plan, backbones=tuple(parts)), num_layers=layers, values=values)


@pytest.mark.parametrize("steps", ["auto", "each", "together"])
def test_backbones_that_take_no_time_are_no_error(steps):
    none = uniform(4, forward_ms=0, backward_ms=0, weight_grad_ms=0, input_grad_ms=0)
    job = Job(profile=joined_profile([none, none], ["a", "b"]), cluster=cluster(), pipeline_ranks=2, microbatches=2)
    made = make_plan(job, SearchOptions(placement="wave", solver_seconds=0, backbone_steps=steps))
    assert made.estimate.step_ms == 0
