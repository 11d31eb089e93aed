"""Which communicators a rank makes for a plan, on backends where each has a stream and buffers of its own.

NCCL and HCCL make one for all ranks of a process group when they first do something together, and one for two ranks of
a group when these first send to one another. gloo has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed_pulse.ir.cluster import MEASURED, Cluster, CommunicatorBytes
from deepspeed_pulse.ir.fill import Fill, HandOver, up_front
from deepspeed_pulse.ir.layout import Grid
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import Channel

Ranks = tuple[int, ...]
"""Global ranks, ascending."""


@dataclass(frozen=True, kw_only=True)
class Communicators:
    """Those of one rank, each once.

    Attributes:
        world: of all ranks of the job, in the world's own group: what they agree on.
        groups: of process groups, by ranks, one of a rank alone too: the pipeline (DeepSpeed's counts, norms, mean
            losses), its data-parallel peers (initial weights, gradients), tied weights, rings in which sums were
            measured.
        pairs: two ranks in the world's own group: DeepSpeed's greeting of neighbours, measuring of layers and links.
        channels: messages of the pipeline, each with a group of its own.
    """

    world: tuple[Ranks, ...]
    groups: tuple[Ranks, ...]
    pairs: tuple[tuple[int, int], ...]
    channels: tuple[Channel, ...]

    @property
    def count(self) -> int:
        return len(self.world) + len(self.groups) + len(self.pairs) + len(self.channels)

    def num_bytes(self, each: CommunicatorBytes) -> int:
        """What they hold on the device."""
        counts = (len(self.world), len(self.groups), len(self.pairs), len(self.channels))
        held = (each.world_bytes, each.group_bytes, each.pair_bytes, each.channel_bytes)
        return sum(count * size for count, size in zip(counts, held, strict=True))


def communicators(
    plan: Plan, rank: int, *, cluster: Cluster | None = None, data_index: int = 0, ties: Iterable[Ranks] = ()
) -> Communicators:
    """Those of a pipeline rank of one replica, from its start until it has trained.

    Saving a whole model adds some on the pipeline's first rank: two ranks each, for every other rank.

    Args:
        cluster: where its links were measured by this job, that is counted too, also where they were kept.
        ties: pipeline ranks that hold copies of the same weights.
    """
    return _of_rank(plan.grid, rank, channels_of(plan), cluster=cluster, data_index=data_index, ties=ties)


def channels_of(plan: Plan) -> tuple[Channel, ...]:
    """All channels of a plan, those of its fill last."""
    hops = [hop for route in plan.routes for hop in route.hops]
    found = [*_channels(plan.placement, hops)]
    for one in plan.conditioning:
        source, reading = plan.estimate_stages(one)
        ranks = {plan.placement[stage] for stage in reading} - {plan.placement[source]}
        found += [Channel(plan.placement[source], rank) for rank in sorted(ranks)]
    if plan.fill is not None:
        readers = {part.name: tuple(plan.readers_of(part)) for part in plan.fill.parts}
        for fill in (plan.fill, up_front(plan.fill, plan.microbatches, readers)):
            found += _frozen_channels(fill)
    return tuple(dict.fromkeys(found))


def fewest_bytes(grid: Grid, placement: Placement, cluster: Cluster) -> tuple[int, ...]:
    """Per pipeline rank what its communicators hold where no named value travels."""
    if cluster.communicators is None:
        return (0,) * grid.pipeline_ranks
    each, there = cluster.communicators, _channels(placement, ())
    return tuple(_of_rank(grid, rank, there, cluster=cluster).num_bytes(each) for rank in range(grid.pipeline_ranks))


def communicator_bytes(plan: Plan, rank: int, cluster: Cluster | None, ties: Iterable[Ranks] = ()) -> int:
    """What the communicators of a pipeline rank hold on its device, in the replica where it is most; 0 if not known."""
    if cluster is None or cluster.communicators is None:
        return 0
    ties, replicas = tuple(ties), range(plan.data_parallel if cluster.name == MEASURED else 1)
    return max(
        communicators(plan, rank, cluster=cluster, data_index=index, ties=ties).num_bytes(cluster.communicators)
        for index in replicas
    )


def _channels(placement: Placement, hops: Iterable[tuple[int, int]]) -> tuple[Channel, ...]:
    """One each way between ranks that a plan's values cross: what goes forward may send a gradient back."""
    edges = [*placement.hidden_edges, *hops]
    crossed = {(placement[a], placement[b]) for a, b in edges if placement[a] != placement[b]}
    return tuple(Channel(a, b) for a, b in sorted(crossed | {(b, a) for a, b in crossed}))


def _frozen_channels(fill: Fill) -> list[Channel]:
    return [
        Channel(rank, filling.work.target_rank, frozen=True)
        for rank, row in enumerate(fill.rows)
        for filling in row
        if isinstance(filling.work, HandOver)
    ]


def _of_rank(
    grid: Grid,
    rank: int,
    there: Sequence[Channel],
    *,
    cluster: Cluster | None = None,
    data_index: int = 0,
    ties: Iterable[Ranks] = (),
) -> Communicators:
    pipeline = tuple(grid.global_rank(r, data_index) for r in range(grid.pipeline_ranks))
    peers = tuple(grid.global_rank(rank, d) for d in range(grid.data_parallel))
    world = tuple(range(grid.num_ranks))
    me, groups = pipeline[rank], [pipeline, peers]
    groups += [tuple(grid.global_rank(r, data_index) for r in tie) for tie in ties if rank in tie]
    pairs = {(min(pair), max(pair)) for pair in itertools.pairwise(pipeline)}
    if cluster is not None and cluster.name == MEASURED and len(world) > 1:
        per_node = cluster.ranks_per_node
        node, place = [r for r in world if r // per_node == me // per_node], world[me % per_node :: per_node]
        groups += [ring for ring in (tuple(node), place) if len(ring) > 1 and ring != world]
        pairs |= {*itertools.pairwise(world), *zip(world, world[per_node:], strict=False)}
    return Communicators(
        world=(world,) if len(world) > 1 else (),
        groups=tuple(dict.fromkeys(tuple(sorted(group)) for group in groups)),
        pairs=tuple(sorted((a, b) for a, b in pairs if me in (a, b))),
        channels=tuple(channel for channel in there if rank in (channel.source_rank, channel.target_rank)),
    )
