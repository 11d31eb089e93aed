"""Models and figures of the PULSE paper (arXiv 2606.19163), and closed forms of step lengths.

MiB sent per sample, forward and backward: two-byte elements, 2 (P - 1) crossings of the hidden state each way; skips
stay on their rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan, Route
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner import Job, SearchOptions, check, estimate, make_plan
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import one_f_one_b

MIB = 2**20
HIDDEN, TEXT, VECTOR = 1024 * 1408, 333 * 1024, 1408
"""Elements of Hunyuan-DiT's hidden state, text conditioning and pooled vector."""
_LINK = Link(bandwidth_gb_per_s=1e9, latency_us=0.0)
_CLUSTER = Cluster(name="paper", nodes=1, ranks_per_node=64, memory_bytes=10**15, intra_node=_LINK, inter_node=_LINK)


def _model(layers: list[LayerCost], skips: list[Skip]) -> Profile:
    return Profile(
        name="paper", device="none", dtype="float16", microbatch_size=1, layers=tuple(layers), skips=tuple(skips)
    )


def _layer(forward_ms: float = 1.0, output_bytes: int = 0) -> LayerCost:
    return LayerCost(
        name="layer",
        forward_ms=forward_ms,
        backward_ms=2 * forward_ms,
        param_bytes=0,
        activation_bytes=1,
        output_bytes=output_bytes,
    )


def uvit(width: int, pairs: int = 14, tokens: int = 258) -> Profile:
    """In blocks, a middle block, out blocks; every in block has a skip to its out block."""
    blocks, size = 2 * pairs + 1, 2 * tokens * width
    skips = [Skip(name=f"skip{i}", source=i, target=blocks - 1 - i, bytes=size) for i in range(pairs)]
    return _model([_layer(output_bytes=size)] * blocks, skips)


def hunyuan(text: str) -> Profile:
    """40 blocks between embedders and head; a skip from block i < 19 to block 39 - i; all blocks read the text.

    ``text``: "hidden", every boundary carries it as in the paper; "value", it visits each rank once; "batch", projected
    on every rank, it is no value of the profile.
    """
    size = 2 * (HIDDEN + (TEXT + VECTOR if text == "hidden" else 0))
    ends = _layer(0.1, size)
    skips = [Skip(name=f"skip{i}", source=1 + i, target=40 - i, bytes=2 * HIDDEN) for i in range(19)]
    if text == "value":
        skips += [Skip(name="text", source=0, target=block, bytes=2 * (TEXT + VECTOR)) for block in range(1, 41)]
    return _model([ends, *[_layer(output_bytes=size)] * 40, ends], skips)


UVIT = (
    (partial(uvit, 1152), 2, 2.27),
    (partial(uvit, 1152), 4, 6.80),
    (partial(uvit, 1152), 8, 15.87),
    (partial(uvit, 2048), 8, 28.22),
)
"""Model, ranks, MiB."""
HUNYUAN = tuple((partial(hunyuan, "hidden"), ranks, mib) for ranks, mib in ((2, 13.61), (4, 40.84), (8, 95.29)))
HUNYUAN_NAMED = ((partial(hunyuan, "value"), 8, 86.1), (partial(hunyuan, "batch"), 8, 77.0))


RELAYED = ((48, 4, 2 * 258 * 2048, 102.80), (80, 8, 2 * HIDDEN, 916.64))
"""Blocks, ranks, bytes of the hidden state and of a skip, MiB: U-ViT and Hunyuan-DiT with skips in the tuple."""


def relayed_mib(blocks: int, ranks: int, size: int) -> float:
    """What 1F1B sends when every skip goes hop by hop through all stages between its ends."""
    skips = [Skip(name=f"skip{i}", source=i, target=blocks - 1 - i, bytes=size) for i in range(blocks // 2)]
    costs = _model([_layer(output_bytes=size)] * blocks, skips)
    cuts, microbatches = tuple(range(0, blocks + 1, blocks // ranks)), 2
    plan = Plan(
        pipeline_ranks=ranks,
        data_parallel=1,
        microbatches=microbatches,
        microbatch_size=1,
        boundaries=cuts,
        placement=Placement.linear(ranks),
        schedule=((),) * ranks,
    )
    routes = []
    for skip in skips:
        first, last = plan.stage_of(skip.source), plan.stage_of(skip.target)
        hops = tuple((stage, stage + 1) for stage in range(first, last))
        routes.append(Route(name=skip.name, source_stage=first, hops=hops))
    plan = replace(plan, routes=tuple(routes))
    plan = replace(plan, schedule=one_f_one_b(Problem(plan, costs, _CLUSTER), microbatches))
    check(plan, num_layers=blocks, values=costs.values)
    return estimate(plan, costs, _CLUSTER).p2p_bytes_per_microbatch / MIB


def sent_mib(costs: Profile, ranks: int) -> float:
    """What a planned wave sends per microbatch."""
    made = make_plan(
        Job(profile=costs, cluster=_CLUSTER, pipeline_ranks=ranks, microbatches=2),
        SearchOptions(placement="wave", solver_seconds=0),
    )
    assert made.estimate is not None
    return made.estimate.p2p_bytes_per_microbatch / MIB


def uniform(stages: int, forward_ms: float = 1.0) -> Profile:
    """One layer a stage; backward takes twice the forward."""
    return _model([_layer(forward_ms)] * stages, [])


def closed_forms(ranks: int, microbatches: int) -> Iterator[tuple[str, float, float]]:
    """(schedule, its closed form, the simulated makespan) for uniform stages; a rank's work is 6 a microbatch."""
    work = 6 * microbatches
    if microbatches >= 1.5 * ranks:
        yield "wave", work + 3 * (ranks - 1), planned_ms("wave", ranks, microbatches, uniform(2 * ranks))
    yield "1f1b", work + 6 * (ranks - 1), planned_ms("1f1b", ranks, microbatches, uniform(ranks, 2.0))
    if microbatches >= 2 * ranks - 1:
        yield "zbv", work + ranks - 1, planned_ms("zbv", ranks, microbatches, uniform(2 * ranks), split=True)


def planned_ms(schedule: str, ranks: int, microbatches: int, costs: Profile, *, split: bool = False) -> float:
    """Makespan of the plan under that name."""
    made = make_plan(
        Job(profile=costs, cluster=_CLUSTER, pipeline_ranks=ranks, microbatches=microbatches),
        SearchOptions(
            placement="linear" if schedule == "1f1b" else "wave",
            schedule=schedule,
            split_backward=split,
            solver_seconds=0,
        ),
    )
    assert made.estimate is not None
    return made.estimate.makespan_ms
