"""Cuts against brute force, and the rules they follow."""

import dataclasses
import random
import time

import pytest
from toys import cluster, layer, plan, profile, random_profile, skip, uniform

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.placement import linear_placement, wave_placement
from deepspeed_pulse.planner.partition import every_cuts, partition
from deepspeed_pulse.planner.weights import Weights, in_flight


def brute_force(weights, placement, depth, num_layers):
    return min(weights.score(cuts, depth) for cuts in every_cuts(num_layers, len(placement)))


def placement_for(rng, num_layers):
    choices = [wave_placement(p, w) for p in (1, 2, 3) for w in (1, 2)] + [linear_placement(p) for p in (1, 2, 3)]
    return rng.choice([c for c in choices if len(c) <= num_layers])


@pytest.mark.parametrize("seed", range(160))
def test_equals_brute_force(seed):
    rng = random.Random(seed)
    num_layers = rng.randrange(4, 11)
    placement = placement_for(rng, num_layers)
    costs = random_profile(rng, num_layers, temb=rng.random() < 0.5, strict=rng.random() < 0.7, ties=seed % 2 == 0)
    slow = cluster(Link(bandwidth_gb_per_s=rng.choice([1e-4, 1e9]), latency_us=1))
    memory = None
    if seed % 4 < 2:  # somewhere between the most frugal cuts and others
        bare = Weights(costs, placement, cluster=slow, data_parallel=1, memory_bytes=0)
        needs = sorted(
            bare.score(cuts, in_flight(placement, 4)).excess_bytes for cuts in every_cuts(num_layers, len(placement))
        )
        memory = int(needs[rng.randrange(1 + len(needs) // 4)] * rng.choice([0.7, 1.0])) + 1
    weights = Weights(costs, placement, cluster=slow, data_parallel=1, memory_bytes=memory)
    cuts = partition(costs, placement, cluster=slow, microbatches=4, memory_bytes=memory)
    for depth in (in_flight(placement, 4), (1,) * len(placement)):
        best = brute_force(weights, placement, depth, num_layers)
        if best.excess_bytes <= 0:
            break
    found = weights.score(cuts, depth)
    if best.excess_bytes > 0:
        assert found.excess_bytes == pytest.approx(best.excess_bytes)
    else:
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(best))


def test_both_ends_of_nested_skips_share_a_rank():
    skips = [skip(f"s{i}", i, 15 - i) for i in range(8)]
    costs = profile([layer(1 + i % 3, 2) for i in range(16)], skips)
    cuts = partition(costs, wave_placement(4), cluster=cluster(), microbatches=4)
    found = plan(wave_placement(4), 1, boundaries=cuts)
    assert all(found.rank_of_layer(s.source) == found.rank_of_layer(s.target) for s in skips)


def test_a_time_embedding_does_not_bind_the_cuts():
    costs = profile([layer() for _ in range(12)], [skip("temb", 0, t) for t in range(1, 12)])
    cuts = partition(costs, wave_placement(3), cluster=cluster(), microbatches=4)
    assert cuts == (0, 2, 4, 6, 8, 10, 12)


def test_the_lightest_skip_is_parted_when_not_all_can_stay():
    """Two skips that cross: 0 -> 2 and 1 -> 3 cannot both stay on one of two ranks of two layers each."""
    costs = profile([layer() for _ in range(4)], [skip("light", 0, 2, 1), skip("heavy", 0, 3, 10)])
    cuts = partition(costs, wave_placement(2), cluster=cluster(), microbatches=2)
    found = plan(wave_placement(2), 1, boundaries=cuts, of=costs)
    assert {route.name: len(route.hops) for route in found.routes} == {"light": 1, "heavy": 0}


def test_too_few_layers_says_how_many_are_needed():
    with pytest.raises(InfeasibleError, match="has 8 stages and needs at least 8 layers, the model 'toy' has 7"):
        partition(uniform(7), wave_placement(4), cluster=cluster(), microbatches=4)


def test_memory_moves_the_cut():
    """The first layers keep much: without a limit rank 0 gets half the work, with one it gets less."""
    costs = profile([layer(activation_bytes=100 if i < 4 else 1) for i in range(8)])
    free = partition(costs, linear_placement(2), cluster=cluster(), microbatches=4)
    tight = partition(costs, linear_placement(2), cluster=cluster(), microbatches=4, memory_bytes=700)
    assert (free, tight) == ((0, 4, 8), (0, 3, 8))


@pytest.mark.parametrize(("num_layers", "ranks", "waves"), [(100, 8, 1), (46, 4, 1), (60, 4, 2)])
def test_is_quick_on_real_sizes_and_close_to_balance(num_layers, ranks, waves):
    rng = random.Random(0)
    costs = profile([layer(rng.uniform(1, 2), rng.uniform(2, 4), output_bytes=9) for _ in range(num_layers)])
    began = time.perf_counter()
    cuts = partition(costs, wave_placement(ranks, waves), cluster=cluster(), microbatches=8)
    assert time.perf_counter() - began < 10
    weights = Weights(costs, wave_placement(ranks, waves), cluster=cluster(), data_parallel=1, memory_bytes=None)
    score = weights.score(cuts, (1,) * (len(cuts) - 1))
    assert score.rank_ms < 1.1 * weights.work_ms[-1] / ranks


@pytest.mark.parametrize(("size", "cut"), [(8, 1), (10, 2)])
def test_bytes_decide_between_equal_loads(size, cut):
    """Five equal layers on a V of two ranks. Cutting at 2 saves the value's trip but moves 10 instead of 1 bytes.

    Both count forward and backward: 2 * size against 2 * (10 - 1).
    """
    sizes = (1, 10, 100, 1, 1)
    costs = profile([layer(output_bytes=s) for s in sizes], [skip("v", 0, 1, size), skip("v", 0, 4, size)])
    cuts = partition(costs, wave_placement(2), cluster=cluster(), microbatches=2)
    assert (cuts[1], cuts[3]) == (cut, 4)
