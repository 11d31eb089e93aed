"""Small profiles and plans that the planner's tests share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.plan import Plan, make_routes
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.ir.schedule import Action, Schedule
from deepspeed_pulse.planner import Job
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.listing import Cap, Prefer, list_schedule

INSTANT = Link(bandwidth_gb_per_s=1e9, latency_us=0.0)


def cluster(link: Link = INSTANT, *, ranks: int = 64, memory_bytes: int = 10**15) -> Cluster:
    return Cluster(
        name="toy", nodes=1, ranks_per_node=ranks, memory_bytes=memory_bytes, intra_node=link, inter_node=link
    )


def layer(forward_ms=1.0, backward_ms=2.0, param_bytes=0, activation_bytes=1, output_bytes=0, **more):
    return LayerCost(
        name="layer",
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        param_bytes=param_bytes,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        **more,
    )


def profile(layers, skips=(), dtype="float32", microbatch_size=1) -> Profile:
    return Profile(
        name="toy",
        device="none",
        dtype=dtype,
        microbatch_size=microbatch_size,
        layers=tuple(layers),
        skips=tuple(skips),
    )


def uniform(num_layers: int, **costs) -> Profile:
    """Half-stage units: forward 1, backward 2."""
    return profile([layer(**costs) for _ in range(num_layers)])


def costly(costs, times):
    """Both halves of a backward take so many times what it takes whole."""
    halves = [(times * x.backward_ms / 2, times * x.backward_ms / 2) for x in costs.layers]
    layers = [replace(x, input_grad_ms=i, weight_grad_ms=w) for x, (i, w) in zip(costs.layers, halves, strict=True)]
    return replace(costs, layers=tuple(layers))


def skip(name: str, source: int, target: int, size: int = 1, gradient: bool = True) -> Skip:
    return Skip(name=name, source=source, target=target, bytes=size, gradient=gradient)


def rows(*texts: str) -> Schedule:
    """One text a rank: ``rows("0F0 0B0", "1F0 1B0")``."""
    return tuple(tuple(map(Action.parse, text.split())) for text in texts)


def plan(
    placement: Sequence[int],
    microbatches: int,
    *,
    boundaries=None,
    schedule: Schedule | None = None,
    of: Profile | None = None,
    data_parallel: int = 1,
) -> Plan:
    """One layer a stage unless ``boundaries`` says otherwise; routes from the profile's skips."""
    bounds = tuple(boundaries or range(len(placement) + 1))
    ranks = max(placement) + 1
    return Plan(
        pipeline_ranks=ranks,
        data_parallel=data_parallel,
        microbatches=microbatches,
        microbatch_size=1,
        boundaries=bounds,
        placement=placement,
        schedule=schedule if schedule is not None else ((),) * ranks,
        routes=make_routes(bounds, placement, of.values) if of else (),
    )


def gpipe(problem: Problem, microbatches: int) -> Schedule:
    """All forwards of a rank, then all its backwards."""
    return list_schedule(problem, microbatches, prefer=Prefer.ALL_FORWARDS)


def wave(problem: Problem, microbatches: int, cap: Cap | None = None) -> Schedule:
    """Earliest start first, and first home without a cap."""
    return list_schedule(problem, microbatches, prefer=Prefer.FORWARD if cap else Prefer.FIRST_HOME, cap=cap)


def job_on(placement: Sequence[int], costs: Profile, **more) -> Job:
    """On the ranks of a placement, one microbatch and the toy cluster unless ``more`` says otherwise."""
    usual = {"cluster": cluster(), "microbatches": 1, "pipeline_ranks": max(placement) + 1}
    return Job(profile=costs, **(usual | more))


def random_profile(
    rng: random.Random, num_layers: int, *, temb: bool = False, strict: bool = True, ties: bool = False
) -> Profile:
    """Uneven layers with skips: nested ones, or any when not ``strict``; perhaps a time embedding.

    ``ties``: all layers take the same time, so that the later keys of an objective decide.
    """
    layers = [
        layer(
            1.0 if ties else rng.uniform(0.2, 3),
            2.0 if ties else rng.uniform(0.2, 6),
            rng.randrange(100),
            rng.randrange(100),
            rng.randrange(1, 1000),
        )
        for _ in range(num_layers)
    ]
    skips, i, j = [], 0, num_layers - 1
    while i < j - 1:
        if rng.random() < 0.6:
            skips.append(skip(f"skip{i}-{j}", i, j, rng.randrange(1, 99), rng.random() < 0.8))
        i, j = i + rng.randrange(2), j - rng.randrange(1, 3)
    if not strict and num_layers > 2:
        source = rng.randrange(num_layers - 1)
        skips.append(skip("odd", source, rng.randrange(source + 1, num_layers), rng.randrange(1, 99)))
    if temb:
        skips += [skip("temb", 0, t, 50) for t in range(1, num_layers) if t % 2 or rng.random() < 0.5]
        source, size = rng.randrange(num_layers), rng.randrange(500, 3000)
        skips += [skip("mid", source, t, size) for t in range(source + 1, num_layers) if rng.random() < 0.5]
    return profile(layers, skips)
