"""Unit costs, to draw a plan without its profile: a stage's forward takes 1 ms, its backward 2 ms."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepspeed_pulse.ir.backbones import BackboneLayers
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.fill import Fill
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip

_NO_BYTES: dict[str, Any] = {"param_bytes": 0, "activation_bytes": 0, "output_bytes": 0}


def with_unit_costs(plan: Plan) -> tuple[Plan, Profile, Cluster]:
    """The plan with a made-up profile and cluster that fit it; messages take no time and no bytes.

    Values that stay on their rank do not show in a timeline, so the plan comes without them, and
    without the fingerprint of its real profile.
    """
    sent = tuple(route for route in plan.routes if route.hops)
    stages = range(plan.num_stages)
    sound = [r for r in sent if r.source_stage in stages and all(to in stages for _, to in r.hops)]
    skips = tuple(
        Skip(name=route.name, source=plan.boundaries[route.source_stage], target=plan.boundaries[stage], bytes=0)
        for route in sound  # the check of the plan tells of others
        for stage in sorted({to for _, to in route.hops})
    )
    shares = (1.0 / len(plan.stage_layers(plan.stage_of(index))) for index in range(plan.num_layers))
    layers = tuple(
        LayerCost(name=str(index), forward_ms=share, backward_ms=2 * share, weight_grad_ms=share, **_NO_BYTES)
        for index, share in enumerate(shares)
    )
    size, name, ranks = plan.microbatch_size, "unit times", plan.grid.num_ranks
    profile = Profile(
        name=name,
        device="none",
        dtype="float32",
        microbatch_size=size,
        layers=layers,
        skips=skips,
        backbones=tuple(
            BackboneLayers(name=part.name, layers=(plan.boundaries[part.stages[0]], plan.boundaries[part.stages[1]]))
            for part in plan.backbones
        ),
    )
    instant = Link(bandwidth_gb_per_s=1e9, latency_us=0.0)
    cluster = Cluster(name=name, nodes=1, ranks_per_node=ranks, memory_bytes=1, intra_node=instant, inter_node=instant)
    unit = dataclasses.replace(plan, routes=sent, fill=_fill(plan), profile_fingerprint=None)
    return unit, profile, cluster


def _fill(plan: Plan) -> Fill | None:
    """Frozen work in proportion to the stages' where the plan's estimate tells, else 1 ms a microbatch."""
    if plan.fill is None:
        return None
    frozen, scale = plan.fill.work_ms(plan.microbatches), 0.0
    if plan.estimate is not None:
        all_work = plan.pipeline_ranks * plan.estimate.makespan_ms * (1 - plan.estimate.bubble_ratio)
        if all_work > frozen:
            scale = 3 * plan.num_stages * plan.microbatches / (all_work - frozen)
    if scale == 0.0 and frozen:
        scale = plan.microbatches / frozen
    parts = []
    for part in plan.fill.parts:
        layers = (dataclasses.replace(x, forward_ms=scale * x.forward_ms, **_NO_BYTES) for x in part.layers)
        parts.append(dataclasses.replace(part, layers=tuple(layers)))
    return dataclasses.replace(plan.fill, parts=tuple(parts))
