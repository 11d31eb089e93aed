"""A small wave with messages and memory, simulated."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner import Job, SearchOptions, make_plan, simulate


@dataclass(frozen=True)
class Sample:
    profile: Profile
    cluster: Cluster
    plan: Plan
    timeline: Timeline


def make_sample(ranks: int, microbatches: int) -> Sample:
    layers = tuple(
        LayerCost(
            name=f"block{i}",
            forward_ms=1.0,
            backward_ms=2.0,
            param_bytes=4_000_000,
            activation_bytes=10_000_000,
            output_bytes=1_000_000,
        )
        for i in range(2 * ranks)
    )
    skips = tuple(Skip(name=f"skip{i}", source=i, target=2 * ranks - 1 - i, bytes=1_000_000) for i in range(ranks))
    profile = Profile(name="toy", device="paper", dtype="float32", microbatch_size=2, layers=layers, skips=skips)
    link = Link(bandwidth_gb_per_s=10.0, latency_us=50.0)
    cluster = Cluster(name="box", nodes=1, ranks_per_node=ranks, memory_bytes=10**11, intra_node=link, inter_node=link)
    plan = make_plan(
        Job(profile=profile, cluster=cluster, pipeline_ranks=ranks, microbatches=microbatches),
        SearchOptions(placement="wave", solver_seconds=0),
    )
    return Sample(profile, cluster, plan, simulate(plan, profile, cluster))


@pytest.fixture(scope="session")
def sample() -> Sample:
    return make_sample(4, 8)


@pytest.fixture(scope="session")
def large() -> Sample:
    return make_sample(8, 32)
