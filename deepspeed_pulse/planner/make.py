"""The front door: a Plan from a profile. Used by the engine and the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.rules import PLAIN, Rules
from deepspeed_pulse.ir.schedule import Schedule
from deepspeed_pulse.planner.cache import kept, plan_file
from deepspeed_pulse.planner.filling.fill import fill_plan
from deepspeed_pulse.planner.making.best import best_plan
from deepspeed_pulse.planner.making.places import placements
from deepspeed_pulse.planner.making.request import Request
from deepspeed_pulse.planner.recompute import recomputed_layers
from deepspeed_pulse.planner.schedules.heuristics import forward_only
from deepspeed_pulse.planner.search.synthesize import Progress, synthesize

_NOT_OPTIONS = ("profile", "cluster", "progress", "frozen", "rules")

MOST_STAGES = 10_000
MOST_FORWARDS = 500_000
"""Stages times microbatches of an order that is made in minutes and a few GB."""


def make_plan(
    profile: Profile,
    *,
    cluster: Cluster,
    pipeline_ranks: int,
    microbatches: int,
    data_parallel: int = 1,
    placement: str = "auto",
    waves: int = 1,
    boundaries: Sequence[int] | None = None,
    schedule: str = "auto",
    memory_bytes: int | None = None,
    split_backward: bool = False,
    solver_seconds: float = 30.0,
    seed: int = 0,
    tolerance: float = 0.0,
    progress: Progress | None = None,
    recompute: str | Sequence[int | str] = "none",
    rules: Rules = PLAIN,
    layout: Layout = Layout.PIPE_MAJOR,
    frozen: Sequence[FrozenPart] = (),
    within_ms: float = math.inf,
    part_skips: bool | None = None,
    plan_cache: str | Path | None = None,
) -> Plan:
    """Cuts, order, routes and estimate for a model on ``pipeline_ranks`` x ``data_parallel`` ranks of a cluster.

    Args:
        placement: "wave", "linear", or "auto": the one that is faster in simulation, the wave among equals.
        boundaries: explicit cuts, 0 and the layer count included; "auto" placement then follows from their number.
        schedule: "auto" or a generator's name.
        memory_bytes: cap on a rank's ``peak_bytes``; None takes the cluster's ``memory_bytes``.
        tolerance: share of the largest load that may be given up for fewer bytes between ranks.
        progress: told the best makespan and the lower bound, in ms, whenever an order was found.
        split_backward: the order may run backward as ``I`` and ``W``.
        recompute: layers that run again in backward: "none", "all", a list of indices and names, or "auto": none if
            that fits the memory, else those that free most for their time, where that is faster than other cuts.
        rules: of the job: ZeRO stage, and when gradients are summed.
        layout: how global ranks are numbered, which decides what crosses nodes.
        frozen: parts that encode the next step's batch in idle time, for the profile's microbatch size.
        within_ms: give up on cuts as soon as it is clear that no order of them has a step as short as that.
        part_skips: cuts of a wave may also send skips that could stay, for a better balance, where that is well faster
            in known orders. None: if ``placement`` is "auto".
        plan_cache: folder in which plans that took time to solve are kept by content.

    Raises:
        ConfigError: an argument is unusable.
        InfeasibleError: too few layers or too little memory; says what would be needed.
        TooSlow: cuts that fit the memory are slower than ``within_ms``.
    """
    _check_counts(pipeline_ranks=pipeline_ranks, microbatches=microbatches, data_parallel=data_parallel, waves=waves)
    _check_cluster(cluster, pipeline_ranks * data_parallel)
    _check_stages(profile, pipeline_ranks, waves)
    places = placements(profile, placement, pipeline_ranks, waves, boundaries, schedule, split_backward)
    _check_forwards(max(map(len, places)), microbatches)
    request = Request(
        profile=profile,
        cluster=cluster,
        pipeline_ranks=pipeline_ranks,
        microbatches=microbatches,
        data_parallel=data_parallel,
        waves=waves,
        boundaries=None if boundaries is None else tuple(boundaries),
        schedule=schedule,
        memory_bytes=cluster.memory_bytes if memory_bytes is None else memory_bytes,
        split_backward=split_backward,
        solver_seconds=solver_seconds / len(places),
        seed=seed,
        tolerance=tolerance,
        progress=progress,
        recompute=recomputed_layers(profile, recompute),
        recompute_more=recompute == "auto",
        rules=rules,
        layout=layout,
        frozen=tuple(frozen),
        within_ms=within_ms,
        part_skips=placement == "auto" if part_skips is None else part_skips,
    )
    if plan_cache is None or solver_seconds <= 0:
        return best_plan(request, places)
    options = {name: value for name, value in vars(request).items() if name not in _NOT_OPTIONS}
    options["rules"] = rules.to_dict()
    if request.frozen:
        options["frozen"] = [asdict(part) for part in request.frozen]
    path = plan_file(plan_cache, profile, cluster, places=places, **options)
    return kept(path, lambda: best_plan(request, places))


def reorder(
    plan: Plan,
    profile: Profile,
    *,
    cluster: Cluster,
    microbatches: int,
    schedule: str = "auto",
    memory_bytes: int | None = None,
    split_backward: bool = False,
    solver_seconds: float = 30.0,
    seed: int = 0,
) -> Plan:
    """The same cuts, placement, routes, rules and frozen parts with another number of microbatches."""
    _check_counts(microbatches=microbatches)
    _check_forwards(plan.num_stages, microbatches)
    found = synthesize(
        replace(plan, microbatches=microbatches, fill=None),
        profile,
        cluster=cluster,
        schedule=schedule,
        memory_bytes=cluster.memory_bytes if memory_bytes is None else memory_bytes,
        split_backward=split_backward,
        solver_seconds=solver_seconds,
        seed=seed,
    )
    if plan.fill is None:
        return found
    return fill_plan(
        found,
        profile,
        cluster,
        plan.fill.parts,
        memory_bytes=memory_bytes,
        solver_seconds=solver_seconds / 2,
    )


def forward_schedule(plan: Plan, microbatches: int) -> Schedule:
    """Forwards only, for evaluation; deadlock-free on any placement."""
    _check_counts(microbatches=microbatches)
    return forward_only(plan.placement, microbatches)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name}: expected an integer >= 1, found {count!r}")


def _check_stages(profile: Profile, ranks: int, waves: int) -> None:
    """Before a placement that large is built; fewer stages than that are compared with the layers."""
    if 2 * ranks * waves > MOST_STAGES:
        raise InfeasibleError(
            f"{ranks} pipeline ranks with {waves} waves have {2 * ranks * waves} stages and need as many layers, the "
            f"model {profile.name!r} has {profile.num_layers}; at most {MOST_STAGES} stages are planned"
        )


def _check_forwards(stages: int, microbatches: int) -> None:
    if stages * microbatches > MOST_FORWARDS:
        raise ConfigError(
            f"microbatches: {microbatches} of {stages} stages are {stages * microbatches} forwards, at most "
            f"{MOST_FORWARDS} are planned; use at most {MOST_FORWARDS // stages} microbatches a step, larger ones or "
            "more data-parallel pipelines"
        )


def _check_cluster(cluster: Cluster, num_ranks: int) -> None:
    if num_ranks > cluster.num_ranks:
        raise ConfigError(
            f"pipeline ranks x data-parallel = {num_ranks} ranks, the cluster {cluster.name!r} has {cluster.num_ranks} "
            f"({cluster.nodes} nodes of {cluster.ranks_per_node}); use fewer ranks or another cluster file"
        )
