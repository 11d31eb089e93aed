"""Gradients leave in buckets: the same in plans as in the engine, and as large as the links want them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from toys import cluster, layer, plan, profile, rows

from deepspeed_pulse.engine.gradients import buckets as engine
from deepspeed_pulse.ir.buckets import BUCKET_BYTES
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner import Job, SearchOptions, make_plan
from deepspeed_pulse.planner.buckets import fitting_bucket_bytes
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import estimate

KIB = 2**10
PER_MS = Link(bandwidth_gb_per_s=KIB / 1e6, latency_us=0.0)
"""1 KiB takes 1 ms."""


def of_one_stage(sizes, link, *, bucket_bytes=BUCKET_BYTES, microbatches=1, backward_ms=2.0):
    """Layers of so many KiB on two replicas; a forward takes 1 ms each."""
    costs = profile([layer(backward_ms=backward_ms, param_bytes=size * KIB) for size in sizes])
    order = rows(" ".join(f"0F{m} 0B{m}" for m in range(microbatches)))
    found = plan((0,), microbatches, schedule=order, data_parallel=2, boundaries=(0, len(sizes)))
    return replace(found, bucket_bytes=bucket_bytes), costs, cluster(link)


@pytest.mark.parametrize(
    ("bucket_kib", "step_ms"),
    [
        (1, 4 + 2 + 8),  # the link works from the last layer's end on
        (2, 4 + 2 + 8),  # a layer of 2 KiB is full
        (4, 4 + 4 + 8),  # two are
        (64, 4 + 4 + 8),  # and behind these comes no more
        (256, 4 + 8 + 8),  # a last one is no smaller than 8 KiB
    ],
)
def test_a_bucket_leaves_when_it_is_full(bucket_kib, step_ms):
    """Four layers of 2 KiB: forwards take 4 ms, backwards 2 each."""
    made = of_one_stage([2] * 4, PER_MS, bucket_bytes=bucket_kib * KIB)
    assert estimate(*made).step_ms == pytest.approx(step_ms)


def test_each_bucket_has_its_latency():
    slow = replace(PER_MS, latency_us=500.0)  # two rounds of a ring of two: 1 ms
    for bucket_kib, number in ((2, 4), (4, 3)):  # 2, 2, 2, 2; 4, 2, 2
        made = of_one_stage([2] * 4, slow, bucket_bytes=bucket_kib * KIB)
        first = 2 if number == 4 else 4
        assert estimate(*made).step_ms == pytest.approx(4 + first + 8 + number)


def test_plans_gather_as_the_engine_does():
    """Layers of one weight each, drawn."""
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.choice([1, 2, 5, 40, 300]) for _ in range(rng.randint(1, 12))]
        size = rng.choice([1, 2, 8, 64, 256, 1024]) * KIB
        problem = Problem(*of_one_stage(sizes, PER_MS, bucket_bytes=size))
        weights = [torch.nn.Parameter(torch.empty(kib * KIB // 4, device="meta")) for kib in reversed(sizes)]
        expected = sorted(sum(w.numel() * 4 for w in bucket) / KIB for bucket in engine.buckets(weights, size))
        found = sorted(bucket.ms for bucket in problem.buckets[0])
        if max(sizes) * KIB < size:
            assert found == pytest.approx(expected), (sizes, size)
        else:  # a large weight leaves alone, and what was gathered before it waits for more; here it goes with it
            assert sum(found) == pytest.approx(sum(expected)) and len(found) <= len(expected), (sizes, size)


def fitting(sizes, link, **more):
    problem = Problem(*of_one_stage(sizes, link, **more))
    return fitting_bucket_bytes(problem.costs, problem.links, problem.placement, problem.plan.microbatches)


def test_buckets_are_as_large_as_links_allow():
    """64 layers of 1 KiB; a step of 192 ms. What half a percent of it is worth, 0.96 ms, is left to larger ones."""
    assert fitting([1] * 64, replace(PER_MS, bandwidth_gb_per_s=1.0)) == BUCKET_BYTES  # nothing is left to sum
    assert fitting([1] * 64, replace(PER_MS, bandwidth_gb_per_s=KIB / 1e6 / 4)) == KIB  # a sum takes 4 ms, not 2
    assert fitting([1] * 64, replace(PER_MS, bandwidth_gb_per_s=KIB / 1e6 / 4), microbatches=4) == 2 * KIB
    latent = replace(PER_MS, bandwidth_gb_per_s=KIB / 1e6 / 4, latency_us=1000.0)
    found = {size: estimate(*of_one_stage([1] * 64, latent, bucket_bytes=size * KIB)).step_ms for size in SIZES}
    assert found[fitting([1] * 64, latent) // KIB] <= min(found.values()) + 0.96
    assert fitting([0] * 4, PER_MS) == BUCKET_BYTES


SIZES = [2**power for power in range(15)]


@pytest.mark.parametrize("seed", range(8))
def test_no_other_size_is_clearly_better(seed):
    """Drawn layers and links; the stage's last backward is the step's."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 3, 8, 90]) for _ in range(rng.randint(2, 20))]
    link = Link(bandwidth_gb_per_s=KIB / 1e6 / rng.choice([0.1, 1, 5]), latency_us=rng.choice([0.0, 100.0, 3000.0]))
    costs, machines = of_one_stage(sizes, link)[1:]
    found = {size: estimate(*of_one_stage(sizes, link, bucket_bytes=size * KIB)).step_ms for size in SIZES}
    job = Job(profile=costs, cluster=machines, pipeline_ranks=1, microbatches=1, data_parallel=2)
    made = make_plan(job, SearchOptions(placement="linear", solver_seconds=0.0))
    assert made.figures.step_ms <= min(found.values()) + 0.005 * 3 * len(sizes) + 1e-9


def test_only_early_sums_are_sized():
    slow = replace(PER_MS, bandwidth_gb_per_s=KIB / 1e6 / 4)
    costs, machines = of_one_stage([1] * 8, slow)[1:]
    options = SearchOptions(placement="linear", solver_seconds=0.0)
    job = Job(profile=costs, cluster=machines, pipeline_ranks=1, microbatches=1, data_parallel=2)
    assert make_plan(job, options).bucket_bytes == KIB
    assert make_plan(replace(job, rules=Rules(reduce_early=False)), options).bucket_bytes == BUCKET_BYTES
    assert make_plan(replace(job, data_parallel=1), options).bucket_bytes == BUCKET_BYTES
