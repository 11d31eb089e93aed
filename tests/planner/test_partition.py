"""Cuts against brute force, and the rules they follow."""

import dataclasses
import itertools
import random
import time

import pytest
from support.cut_cases import MICROBATCHES, agrees, brute_force, key_of, random_case
from toys import cluster, gpipe, job_on, layer, plan, profile, random_profile, skip, uniform, wave

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner import estimate, simulate
from deepspeed_pulse.planner.partition import lexicographic
from deepspeed_pulse.planner.partition.cut_costs import CutCosts
from deepspeed_pulse.planner.partition.cuts import best_partition, partition
from deepspeed_pulse.planner.partition.descent import between, descent, mirrored, nearby
from deepspeed_pulse.planner.problem import Problem


@pytest.mark.parametrize("seed", [*range(120), 159])
def test_equals_brute_force(seed):
    """``benchmarks/planner/partition.py`` tries 500 of these.

    159: a tolerance is a share of the best load with the values' links, not of the smaller one without them.
    """
    case = random_case(seed)
    found = best_partition(case.weights, microbatches=MICROBATCHES, tolerance=case.tolerance)
    depth, expected = brute_force(case)
    key = key_of(case, found.cuts, depth, expected)
    assert agrees(key, expected), (key, expected)
    assert found.exact or expected[0] > 0
    if expected[0] <= 0:
        assert found.bound_ms <= found.score.load_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force_with_fill_and_drain(seed):
    case = random_case(seed)
    weights = case.weights.filling(1 + seed % 9)
    case = dataclasses.replace(case, weights=weights)
    found = best_partition(weights, microbatches=MICROBATCHES, tolerance=case.tolerance)
    depth, expected = brute_force(case)
    assert agrees(key_of(case, found.cuts, depth, expected), expected)
    assert found.exact or expected[0] > 0
    assert found.score.load_ms * (1 + 1e-9) >= weights.ideal_ms


@pytest.mark.parametrize("seed", range(20))
def test_no_step_is_shorter_than_its_loads_with_fill_and_drain(seed):
    rng = random.Random(seed)
    costs, microbatches = random_profile(rng, 12, temb=True, strict=False), rng.randrange(1, 9)
    placement = rng.choice([Placement.wave(3), Placement.wave(2, 2), Placement.linear(4), Placement.loop(2, 3)])
    cuts = tuple(sorted({0, 12, *rng.sample(range(1, 12), len(placement) - 1)}))
    blank = plan(placement, microbatches, boundaries=cuts, of=costs)
    weights = CutCosts(job_on(placement, costs), placement).filling(microbatches)
    load = weights.score(cuts, (1,) * len(placement)).load_ms
    for make in (gpipe, wave):
        order = make(Problem(blank, costs, cluster()), microbatches)
        timeline = simulate(dataclasses.replace(blank, schedule=order), costs, cluster())
        assert timeline.makespan_ms * (1 + 1e-9) >= microbatches * load


@pytest.mark.parametrize("seed", range(12))
def test_links_carry_what_the_simulator_sends(seed):
    """The load's traffic is the simulator's, link by link."""
    rng = random.Random(seed)
    costs = random_profile(rng, 12, temb=True, strict=False)
    placement = rng.choice([Placement.wave(3), Placement.wave(2, 2), Placement.linear(4)])
    weights = CutCosts(
        job_on(placement, costs),
        placement,
    )
    cuts = tuple(sorted({0, 12, *rng.sample(range(1, 12), len(placement) - 1)}))
    blank = plan(placement, 1, boundaries=cuts, of=costs)
    order = gpipe(Problem(blank, costs, cluster()), 1)
    sent: dict[tuple[int, int], float] = {}
    for t in simulate(dataclasses.replace(blank, schedule=order), costs, cluster()).transfers:
        pair = (t.source_rank, t.target_rank)
        sent[pair] = sent.get(pair, 0) + t.num_bytes
    assert weights.traffic(enumerate(itertools.pairwise(cuts))) == sent


def test_traffic_of_some_stages_is_what_passes_among_them():
    costs = profile(uniform(6, output_bytes=7).layers, [skip("far", 0, 5, 3), skip("near", 2, 4, 5)])
    weights = CutCosts(job_on(Placement.linear(3), costs), Placement.linear(3))
    assert weights.traffic([(1, (2, 4))]) == {}
    assert weights.traffic([(1, (2, 4)), (2, (4, 6))]) == {(1, 2): 12, (2, 1): 12}


def test_a_lone_skip_that_would_ruin_the_balance_travels():
    """0 -> 8 of 16 layers: on one rank of four it would hold half of the model."""
    skips = [skip("lone", 0, 8, 5)]
    cuts = partition(
        job_on(Placement.wave(4), profile([layer()] * 16, skips), microbatches=4),
        Placement.wave(4),
    )
    assert sum(cuts[s + 1] - cuts[s] for s in (0, 7)) == 4


def test_a_value_on_one_side_of_the_turn_does_not_hold_the_cuts():
    """As heavy as the skips, the residual 2 -> 5 would cost a quarter of a rank's load to keep; the skips stay."""
    skips = [skip("outer", 0, 15, 5), skip("middle", 1, 14, 5), skip("inner", 7, 8, 5), skip("residual", 2, 5, 5)]
    weights = CutCosts(
        job_on(Placement.wave(4), profile([layer()] * 16, skips)),
        Placement.wave(4),
    )
    assert [value.name for value in weights.paired] == ["outer", "middle", "inner"]
    found = best_partition(weights, microbatches=8)
    assert found.cuts == (0, 2, 4, 6, 8, 10, 12, 14, 16)


def test_of_values_side_by_side_the_one_in_the_middle_of_the_work_is_paired():
    costs = profile(uniform(10).layers, [skip("long", 0, 6), skip("late", 7, 9)])
    assert [value.name for value in CutCosts(job_on(Placement.wave(2), costs), Placement.wave(2)).paired] == ["long"]


def test_one_crossing_skip_does_not_part_the_nested_ones():
    nested = [skip(f"s{i}", 2 * i, 45 - 2 * i, 500) for i in range(11)]
    rng = random.Random(0)
    layers = [layer(rng.uniform(1, 2), rng.uniform(2, 4), output_bytes=100) for _ in range(46)]
    costs = profile(layers, [*nested, skip("crossing", 3, 20, 300)])
    weights = CutCosts(
        job_on(Placement.wave(4), costs),
        Placement.wave(4),
    )
    found = best_partition(weights, microbatches=8)
    assert found.exact
    assert not weights.binding(weights.paired[:11]).parts(found.cuts)
    assert found.score.load_ms < 1.1 * weights.ideal_ms


@pytest.mark.parametrize("crossed", [(3, 4), (2, 7), (0, 10)])
def test_skips_that_cross_others_give_way_to_the_nested_ones(crossed):
    """Two of eleven equal skips swap their targets: the load stays that of the nine others, within 2 %."""
    rng = random.Random(1)
    layers = [layer(rng.uniform(1, 2), rng.uniform(2, 4), output_bytes=100) for _ in range(46)]
    ends = [(2 * i, 45 - 2 * i) for i in range(11)]
    a, b = crossed
    swapped = dict(enumerate(ends)) | {a: (ends[a][0], ends[b][1]), b: (ends[b][0], ends[a][1])}

    def found(pairs):
        skips = [skip(f"s{i}", source, target, 500) for i, (source, target) in pairs]
        weights = CutCosts(
            job_on(Placement.wave(4), profile(layers, skips)),
            Placement.wave(4),
        )
        return weights, best_partition(weights, microbatches=8)

    weights, best = found(swapped.items())
    assert best.exact and not weights.parts(best.cuts)
    assert best.score.load_ms < 1.02 * found((i, e) for i, e in enumerate(ends) if i not in crossed)[1].score.load_ms


def test_heavier_skips_are_the_nested_ones():
    """One skip of 100 bytes crosses three of 30: it stays and they travel; of 80 it is the other way round."""
    ends = [(0, 13), (2, 11), (4, 9)]
    for size, kept in ((100, ["heavy"]), (80, ["s0", "s1", "s2"])):
        skips = [*(skip(f"s{i}", a, b, 30) for i, (a, b) in enumerate(ends)), skip("heavy", 6, 15, size)]
        weights = CutCosts(
            job_on(Placement.wave(2), profile([layer()] * 16, skips)),
            Placement.wave(2),
        )
        assert [value.name for value in weights.paired] == kept


def test_a_slow_link_pulls_the_cut_to_where_little_is_sent():
    """Cutting in the middle would send 1000 bytes at 1 byte a ms; one layer further it is 1."""
    sizes = (9, 9, 9, 1000, 1, 9, 9, 9)
    costs = profile([layer(output_bytes=size) for size in sizes])
    slow = cluster(Link(bandwidth_gb_per_s=1e-6, latency_us=0))
    assert partition(
        job_on(Placement.linear(2), costs, cluster=slow, microbatches=2),
        Placement.linear(2),
    ) == (0, 5, 8)
    assert partition(
        job_on(Placement.linear(2), costs, microbatches=2),
        Placement.linear(2),
    ) == (0, 4, 8)
    assert partition(
        job_on(Placement.linear(2), costs, microbatches=2),
        Placement.linear(2),
        tolerance=0.3,
    ) == (0, 5, 8)


def test_five_hundred_layers():
    """200 nested skips, P = 32: under 10 s (0.5 s alone) and far from 1 GB."""
    rng = random.Random(0)
    layers = [layer(rng.uniform(1, 2), rng.uniform(2, 4), output_bytes=rng.randrange(1, 1000)) for _ in range(500)]
    sources, targets = sorted(rng.sample(range(250), 200)), sorted(rng.sample(range(251, 500), 200), reverse=True)
    skips = [skip(f"s{i}", a, b, 500) for i, (a, b) in enumerate(zip(sources, targets, strict=True))]
    weights = CutCosts(
        job_on(Placement.wave(32), profile(layers, skips)),
        Placement.wave(32),
    )
    began = time.process_time()
    found = best_partition(weights, microbatches=64)
    assert time.process_time() - began < 10
    assert found.exact and not weights.parts(found.cuts)
    assert found.score.load_ms < 1.1 * weights.ideal_ms


def test_both_ends_of_nested_skips_share_a_rank():
    skips = [skip(f"s{i}", i, 15 - i) for i in range(8)]
    costs = profile([layer(1 + i % 3, 2) for i in range(16)], skips)
    cuts = partition(
        job_on(Placement.wave(4), costs, microbatches=4),
        Placement.wave(4),
    )
    found = plan(Placement.wave(4), 1, boundaries=cuts)
    assert all(found.rank_of_layer(s.source) == found.rank_of_layer(s.target) for s in skips)


def test_a_time_embedding_does_not_bind_the_cuts():
    costs = profile([layer() for _ in range(12)], [skip("temb", 0, t) for t in range(1, 12)])
    cuts = partition(
        job_on(Placement.wave(3), costs, microbatches=4),
        Placement.wave(3),
    )
    assert cuts == (0, 2, 4, 6, 8, 10, 12)


def test_the_lightest_skip_is_parted_when_not_all_can_stay():
    """Two skips that cross: 0 -> 2 and 1 -> 3 cannot both stay on one of two ranks of two layers each."""
    costs = profile([layer() for _ in range(4)], [skip("light", 0, 2, 1), skip("heavy", 0, 3, 10)])
    cuts = partition(
        job_on(Placement.wave(2), costs, microbatches=2),
        Placement.wave(2),
    )
    found = plan(Placement.wave(2), 1, boundaries=cuts, of=costs)
    assert {route.name: len(route.hops) for route in found.routes} == {"light": 1, "heavy": 0}


def test_too_few_layers_says_how_many_are_needed():
    with pytest.raises(InfeasibleError, match="has 8 stages and needs at least 8 layers, the model 'toy' has 7"):
        partition(
            job_on(Placement.wave(4), uniform(7), microbatches=4),
            Placement.wave(4),
        )


def test_memory_moves_the_cut():
    """The first layers keep much: without a limit rank 0 gets half the work, with one it gets less."""
    costs = profile([layer(activation_bytes=100 if i < 4 else 1) for i in range(8)])
    free = partition(
        job_on(Placement.linear(2), costs, microbatches=4),
        Placement.linear(2),
    )
    tight = partition(
        job_on(Placement.linear(2), costs, microbatches=4, memory_bytes=700),
        Placement.linear(2),
    )
    assert (free, tight) == ((0, 4, 8), (0, 3, 8))


@pytest.mark.parametrize(
    ("placement", "heavy", "even"),
    [(Placement.linear(2), (0, 1, 2, 3), (0, 4, 8)), (Placement.wave(2), (0, 1, 6, 7), (0, 2, 4, 6, 8))],
    ids=["linear", "wave"],
)
def test_a_bucket_that_is_full_is_counted_once_a_rank(placement, heavy, even):
    """4 GB of weights on one of two ranks, ZeRO-1 on two replicas: 8 with gradients, 6 of state, 2 in each bucket."""
    costs = profile([layer(param_bytes=10**9 if i in heavy else 0, activation_bytes=0) for i in range(8)])
    job = job_on(placement, costs, data_parallel=2, rules=Rules.of(1), memory_bytes=18 * 10**9)
    assert partition(job, placement) == even
    assert CutCosts(job, placement).memory_of(even, [1] * len(placement)).tolist() == [18e9, 0]
    rows = plan(placement, 1, boundaries=even, of=costs, data_parallel=2)
    planned = dataclasses.replace(rows, schedule=gpipe(Problem(rows, costs, cluster()), 1), rules=job.rules)
    assert estimate(planned, costs, cluster()).peak_bytes == (18 * 10**9, 0)


def test_of_cuts_that_need_least_memory_the_balanced_ones_are_taken():
    """All weights are in the first and the last layer, so every cut between them is as good."""
    costs = profile([layer(param_bytes=1000 if i in (0, 5) else 0, activation_bytes=0) for i in range(6)])
    cuts = partition(job_on(Placement.linear(2), costs, memory_bytes=1), Placement.linear(2))
    assert cuts == (0, 3, 6)


@pytest.mark.parametrize(("num_layers", "ranks", "waves"), [(100, 8, 1), (46, 4, 1), (60, 4, 2)])
def test_is_quick_on_real_sizes_and_close_to_balance(num_layers, ranks, waves):
    rng = random.Random(0)
    costs = profile([layer(rng.uniform(1, 2), rng.uniform(2, 4), output_bytes=9) for _ in range(num_layers)])
    began = time.process_time()
    cuts = partition(
        job_on(Placement.wave(ranks, waves), costs, microbatches=8),
        Placement.wave(ranks, waves),
    )
    assert time.process_time() - began < 5
    weights = CutCosts(
        job_on(Placement.wave(ranks, waves), costs),
        Placement.wave(ranks, waves),
    )
    score = weights.score(cuts, (1,) * (len(cuts) - 1))
    assert score.load_ms < 1.1 * weights.work_ms[-1] / ranks


@pytest.mark.parametrize(("size", "cut"), [(8, 1), (10, 2)])
def test_bytes_decide_between_equal_loads(size, cut):
    """Five equal layers on a V of two ranks. Cutting at 2 saves the value's trip but moves 10 instead of 1 bytes.

    Both count forward and backward: 2 * size against 2 * (10 - 1).
    """
    sizes = (1, 10, 100, 1, 1)
    costs = profile([layer(output_bytes=s) for s in sizes], [skip("v", 0, 1, size), skip("v", 0, 4, size)])
    cuts = partition(
        job_on(Placement.wave(2), costs, microbatches=2),
        Placement.wave(2),
    )
    assert (cuts[1], cuts[3]) == (cut, 4)


def test_two_waves_of_46_layers_come_close_to_an_even_split():
    """From nested cuts alone 9 % above; 0.2 % with local search. The same cuts every time."""
    rng = random.Random(0)
    layers = [layer(rng.uniform(1, 2), rng.uniform(2, 4), output_bytes=rng.randrange(1, 1000)) for _ in range(46)]
    costs = profile(layers, [skip(f"s{i}", 2 * i, 45 - 2 * i, 500) for i in range(11)])
    weights = CutCosts(
        job_on(Placement.wave(4, 2), costs),
        Placement.wave(4, 2),
    )
    found = best_partition(weights, microbatches=8)
    assert not found.exact and not weights.parts(found.cuts)
    assert found.bound_ms <= found.score.load_ms < 1.02 * weights.ideal_ms
    assert best_partition(weights, microbatches=8) == found


@pytest.mark.parametrize("moves", [mirrored, nearby, between])
def test_moves_leave_no_stage_empty_and_are_made_until_none_helps(moves):
    cuts = (0, 1, 2, 9, 12)

    def uneven(cuts):
        return sum((b - a) ** 2 for a, b in itertools.pairwise(cuts))

    for moved in moves(cuts):
        assert (moved[0], moved[-1], len(moved)) == (0, 12, 5) and moved != cuts
        assert all(a < b for a, b in itertools.pairwise(moved))
    value, found, looked_at = descent(uneven, cuts, moves)
    assert value == uneven(found) <= min(map(uneven, moves(found)))
    assert value < uneven(cuts) and looked_at >= len(list(moves(found)))


def test_what_leaves_through_one_port_adds_up():
    """The middle one of three ranks sends 3 MB on and 5 MB back: 3 and 5 ms, or 8 where it has one port."""
    costs = profile([layer(0.1, 0.1, output_bytes=size) for size in (5_000_000, 3_000_000, 0)])
    for one_port, load in ((False, 5.0), (True, 8.0)):
        link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0, one_port=one_port)
        placement = Placement.linear(3)
        weights = CutCosts(job_on(placement, costs, cluster=cluster(link)), placement)
        assert weights.score((0, 1, 2, 3), (1, 1, 1)).load_ms == load


def test_values_on_a_slow_link_do_not_make_a_space_that_memory_cannot_hold(monkeypatch):
    """Their link takes many times the compute, so within its load nearly all cuts lie."""
    monkeypatch.setattr(lexicographic, "MAX_EDGES", 10**5)
    num = 120
    costs = profile(
        [layer(1, 2) for _ in range(num)], [skip("text", 0, num // 2, 10**9), skip("text", 0, num - 1, 10**9)]
    )
    slow = cluster(Link(bandwidth_gb_per_s=0.1, latency_us=0))
    placement = Placement.wave(2)
    made = []
    space = lexicographic._Search._made

    def counted(self, most_ms):
        made.append(most_ms)
        return space(self, most_ms)

    monkeypatch.setattr(lexicographic._Search, "_made", counted)
    weights = CutCosts(job_on(placement, costs, cluster=slow, microbatches=4), placement)
    found = best_partition(weights, microbatches=4)
    assert made and not found.exact
    assert found.score.load_ms < 1.5 * num * 3 / 2 + 20000
