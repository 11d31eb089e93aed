"""Figures of the PULSE paper (arXiv 2606.19163): MiB sent per sample and direction pair, and step lengths.

Two-byte elements, forward and backward, 2 (P - 1) crossings of the hidden state each way; skips stay on their rank.
"""

import math

import pytest
from toys import cluster, layer, plan, profile, skip, uniform

from deepspeed_pulse.ir.placement import linear_placement, wave_placement
from deepspeed_pulse.planner.heuristics import one_f_one_b, wave
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.make import make_plan
from deepspeed_pulse.planner.simulate import estimate

MIB = 2**20
HIDDEN, TEXT, VECTOR = 1024 * 1408, 333 * 1024, 1408
"""Elements of Hunyuan-DiT's hidden state, text conditioning and pooled vector."""


def uvit(width, pairs=14, tokens=258):
    """In blocks, a middle block, out blocks; every in block has a skip to its out block."""
    blocks, size = 2 * pairs + 1, 2 * tokens * width
    skips = [skip(f"skip{i}", i, blocks - 1 - i, size) for i in range(pairs)]
    return profile([layer(output_bytes=size)] * blocks, skips, dtype="float16")


def hunyuan(text_in_hidden):
    """40 blocks between embedders and head; a skip from block i < 19 to block 39 - i; all blocks read the text."""
    size = 2 * (HIDDEN + (TEXT + VECTOR if text_in_hidden else 0))
    ends = layer(0.1, 0.2, output_bytes=size)
    skips = [skip(f"skip{i}", 1 + i, 40 - i, 2 * HIDDEN) for i in range(19)]
    if not text_in_hidden:
        skips += [skip("text", 0, block, 2 * (TEXT + VECTOR)) for block in range(1, 41)]
    return profile([ends, *[layer(output_bytes=size)] * 40, ends], skips, dtype="float16")


def sent_mib(costs, ranks):
    made = make_plan(costs, cluster=cluster(), pipeline_ranks=ranks, microbatches=2, placement="wave", solver_seconds=0)
    return made.estimate.p2p_bytes_per_microbatch / MIB


@pytest.mark.parametrize(
    ("width", "ranks", "published"), [(1152, 2, 2.27), (1152, 4, 6.80), (1152, 8, 15.87), (2048, 8, 28.22)]
)
def test_uvit_traffic(width, ranks, published):
    assert sent_mib(uvit(width), ranks) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("ranks", "published"), [(2, 13.61), (4, 40.84), (8, 95.29)])
def test_hunyuan_traffic_with_the_text_in_the_hidden_state(ranks, published):
    """As in the paper: every boundary carries the text, on the way down and again on the way up."""
    assert sent_mib(hunyuan(text_in_hidden=True), ranks) == pytest.approx(published, rel=0.005)


def test_hunyuan_traffic_with_the_text_as_a_named_value():
    """It visits each rank once and is kept there for the way up."""
    assert sent_mib(hunyuan(text_in_hidden=False), 8) == pytest.approx(86.1, rel=0.005)


def test_tied_text_projection_sends_hidden_states_only():
    """Projected on every rank from the batch, the text is no value of the profile."""
    costs = hunyuan(text_in_hidden=False)
    bare = profile(costs.layers, [s for s in costs.skips if s.name != "text"], dtype="float16")
    assert sent_mib(bare, 8) == pytest.approx(77.0, rel=0.005)


def relayed_mib(blocks, ranks, size):
    """Skips relayed hop by hop through every stage, forward and backward: 2 ((K + 4) D / 4 - 1) payloads."""
    return 2 * ((blocks + 4) * ranks / 4 - 1) * size / MIB


def test_relayed_baselines():
    assert relayed_mib(48, 4, 2 * 258 * 2048) == pytest.approx(102.80, rel=0.005)
    assert relayed_mib(80, 8, 2 * HIDDEN) == pytest.approx(916.64, rel=0.005)


@pytest.mark.parametrize("ranks", [*range(1, 9), 13, 16])
def test_uniform_wave_takes_6m_plus_3p_less_3(ranks):
    """For every M >= 1.5 P, which is the bound."""
    costs, placement, least = uniform(2 * ranks), wave_placement(ranks), math.ceil(1.5 * ranks)
    for microbatches in range(least, 3 * ranks if ranks <= 8 else least + 3):
        found = simulated(placement, microbatches, wave, costs)
        assert found.makespan_ms == pytest.approx(6 * microbatches + 3 * (ranks - 1)), microbatches
        assert found.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 6), (5, 8), (8, 12), (8, 14), (4, 16)])
def test_the_wave_is_planned_by_that_name(ranks, microbatches):
    options = {"placement": "wave", "schedule": "wave", "solver_seconds": 0}
    made = make_plan(uniform(2 * ranks), cluster=cluster(), pipeline_ranks=ranks, microbatches=microbatches, **options)
    assert made.estimate.makespan_ms == pytest.approx(6 * microbatches + 3 * (ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (5, 10), (8, 16), (8, 32)])
def test_uniform_zbv_takes_6m_plus_p_less_1(ranks, microbatches):
    """Split backward: a forward, an input gradient and a weight gradient of one unit each."""
    made = make_plan(
        uniform(2 * ranks),
        cluster=cluster(),
        pipeline_ranks=ranks,
        microbatches=microbatches,
        schedule="zbv",
        split_backward=True,
        solver_seconds=0,
    )
    assert made.estimate.makespan_ms == pytest.approx(6 * microbatches + ranks - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (3, 5), (4, 4), (8, 12), (8, 20)])
def test_uniform_1f1b_takes_6m_plus_6p_less_6(ranks, microbatches):
    costs = uniform(ranks, forward_ms=2.0, backward_ms=4.0)
    found = simulated(linear_placement(ranks), microbatches, one_f_one_b, costs)
    assert found.makespan_ms == pytest.approx(6 * (microbatches + ranks - 1))


def simulated(placement, microbatches, generator, costs):
    order = generator(Instance(plan(placement, microbatches), costs, cluster()), microbatches)
    return estimate(plan(placement, microbatches, schedule=order), costs, cluster())
