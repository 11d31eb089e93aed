"""Which communicators a rank makes for a plan, by hand; that it makes these is tested on the stand-in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import cluster, layer, plan, profile, skip

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import MEASURED, Cluster, CommunicatorBytes
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.communicators import channels_of, communicator_bytes, communicators
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Route
from deepspeed_pulse.ir.program import Channel
from deepspeed_pulse.planner import Job, estimate, make_plan

MB = 2**20
HCCL = CommunicatorBytes.of_hccl()


def test_an_inner_rank_of_a_wave() -> None:
    found = communicators(plan(Placement.wave(4), 4), 1)
    assert found.world == ((0, 1, 2, 3),)
    assert found.groups == ((0, 1, 2, 3), (1,))
    assert found.pairs == ((0, 1), (1, 2))
    assert set(found.channels) == {Channel(0, 1), Channel(1, 0), Channel(1, 2), Channel(2, 1)}
    assert found.count == 9 and found.num_bytes(HCCL) == 2 * MB * (3 * 200 + 6 * 20)


@pytest.mark.parametrize("placement", [Placement.wave(2), Placement.wave(2, 2), Placement.linear(2)])
def test_two_neighbours_have_two_channels_whatever_the_placement(placement: Placement) -> None:
    assert channels_of(plan(placement, 4)) == (Channel(0, 1), Channel(1, 0))


def test_replicas_have_a_group_of_peers_and_one_of_the_pipeline() -> None:
    found = communicators(replace(plan(Placement.wave(2), 4), data_parallel=2), 1, data_index=1, ties=[(0, 1), (0,)])
    assert found.world == ((0, 1, 2, 3),) and found.groups == ((1, 3), (2, 3)) and found.pairs == ((1, 3),)
    alone = communicators(plan((0,), 4), 0)
    assert (alone.world, alone.groups, alone.pairs, alone.channels) == ((), ((0,),), (), ())


def test_a_route_is_a_channel_each_way() -> None:
    routed = replace(plan(Placement.linear(3), 4), routes=(Route(name="x", source_stage=0, hops=((0, 2),)),))
    assert {Channel(0, 2), Channel(2, 0)} <= set(channels_of(routed))


def test_measuring_leaves_pairs_and_rings() -> None:
    machines = replace(cluster(ranks=2), name=MEASURED, nodes=2, ranks_per_node=2)
    found = communicators(plan(Placement.wave(4), 4), 1, cluster=machines)
    assert found.groups == ((0, 1, 2, 3), (1,), (0, 1), (1, 3)) and found.pairs == ((0, 1), (1, 2), (1, 3))


@pytest.mark.parametrize(
    ("told", "megabytes"),
    [
        ({}, (200, 200, 20, 20)),
        ({"option_mb": 16}, (200, 16, 20, 20)),
        ({"environment_mb": 50, "message_mb": 0}, (50, 50, 0, 50)),
        ({"environment_mb": 50, "option_mb": 16, "message_mb": 0}, (50, 16, 0, 16)),
    ],
)
def test_what_hccl_keeps(told: dict[str, int], megabytes: tuple[int, ...]) -> None:
    found = CommunicatorBytes.of_hccl(**told)
    assert found == CommunicatorBytes(
        **dict(zip(CommunicatorBytes.__dataclass_fields__, (2 * mb * MB for mb in megabytes), strict=True))
    )


def test_a_cluster_says_what_they_hold_or_nothing() -> None:
    assert load_cluster("910a:1x8").communicators == HCCL and load_cluster("h100:1x8").communicators is None
    held = replace(cluster(), communicators=HCCL)
    assert Cluster.from_json(held.to_json()) == held and "communicators" not in cluster().to_json()


COSTS = profile([layer(param_bytes=10**6, activation_bytes=10**5) for _ in range(8)], [skip("a", 0, 7)])


def job(machines: Cluster, memory_bytes: int | None = None) -> Job:
    return Job(profile=COSTS, cluster=machines, pipeline_ranks=2, microbatches=4, memory_bytes=memory_bytes)


def test_predicted_memory_and_limits_have_them_in() -> None:
    free, held = cluster(), replace(cluster(), communicators=HCCL)
    made = make_plan(job(free))
    without, with_them = estimate(made, COSTS, free), estimate(made, COSTS, held)
    buffers = communicator_bytes(made, 0, held)
    assert buffers == 2 * MB * (3 * 200 + 3 * 20) and communicator_bytes(made, 0, free) == 0
    assert [b - a for a, b in zip(without.peak_bytes, with_them.peak_bytes, strict=True)] == [buffers] * 2
    limit = max(with_them.peak_bytes)
    assert max(make_plan(job(held, limit)).estimate.peak_bytes) <= limit
    with pytest.raises(InfeasibleError, match=r"buffers of communicators up to 1\.384 GB"):
        make_plan(job(held, buffers))
