"""What is planned before the ranks start: cuts for the other sides, plans for ours. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from namespaces import TBF_SHARE
from slow_network.cases import Case

from deepspeed_pulse.ir.choice import Choice
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, make_plan, tune
from deepspeed_pulse.report.tuning import describe

SOLVER_SECONDS = 5.0
PLACEMENTS = {"1f1b": "linear", "dualpipev": "wave", "zbv": "wave", "interleaved": "loop"}
"""Of the stages of other sides, by schedule."""
LATENCY_US = 300.0
"""Of a message between two processes of this machine, roughly."""


def limited(unlimited: Cluster, mbit: float | None) -> Cluster:
    """The ranks as they were measured, with cards of a limit."""
    if mbit is None:
        return unlimited
    speed, free = TBF_SHARE * mbit / 8e3, unlimited.intra_node
    link = replace(
        free,
        bandwidth_gb_per_s=speed,
        bus_gb_per_s=min(speed, free.bus_gb_per_s or speed),
        latency_us=max(LATENCY_US, free.latency_us),
        one_port=True,
    )
    return replace(unlimited, intra_node=link, inter_node=link)


def nominal(case: Case) -> Cluster:
    """For cuts that balance time alone."""
    shape = {"nodes": case.ranks, "ranks_per_node": 1, "memory_bytes": 10**12}
    fast = Link(bandwidth_gb_per_s=1.0, latency_us=LATENCY_US)
    return Cluster(name="namespaces", **shape, intra_node=fast, inter_node=fast)


def balanced(case: Case, profile: Profile, schedule: str) -> tuple[int, ...]:
    """The best cuts for time alone, for a side that relays and runs this schedule, one of :data:`PLACEMENTS`."""
    return make_plan(
        Job(
            profile=replace(profile, skips=()),
            cluster=nominal(case),
            pipeline_ranks=case.ranks,
            microbatches=case.microbatches,
        ),
        SearchOptions(
            placement=PLACEMENTS[schedule],
            schedule=schedule,
            split_backward=schedule == "zbv",
            solver_seconds=0.0,
        ),
    ).boundaries


def pipelined(case: Case, profile: Profile, placement: str, cluster: Cluster | None = None) -> dict[str, Any]:
    """Of a pipeline of all ranks, what is ``told`` of it, and the ``options`` that the ``build`` of our side takes."""
    plan = make_plan(
        Job(
            profile=profile, cluster=cluster or nominal(case), pipeline_ranks=case.ranks, microbatches=case.microbatches
        ),
        SearchOptions(placement=placement, solver_seconds=SOLVER_SECONDS),
    )
    return _side(_as_planned(plan), plan)


def data_parallel(case: Case, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """The same for all ranks with a whole model each."""
    job = Job(
        profile=profile,
        cluster=cluster,
        pipeline_ranks=1,
        data_parallel=case.ranks,
        microbatches=case.microbatches // case.ranks,
    )
    plan = make_plan(job, SearchOptions(placement="linear", solver_seconds=0.0))
    return _side(_as_planned(plan), plan)


def tuned(case: Case, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """The same for what the tuner chooses."""
    best = tune(
        OpenJob(profiles=[profile], cluster=cluster, global_batch=case.microbatches), solver_seconds=SOLVER_SECONDS
    ).best
    return _side(best.choice, best.planned)


def _as_planned(plan: Plan) -> Choice:
    """Of a pipeline, or a whole model on each rank."""
    return Choice(
        pipeline_ranks=plan.pipeline_ranks,
        data_parallel=plan.data_parallel,
        waves=plan.waves,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        loop=plan.pipeline_ranks > 1 and plan.placement.is_loop,
    )


def _side(choice: Choice, plan: Plan) -> dict[str, Any]:
    options = {"plan": plan.to_json(), "samples": choice.microbatch_size, "zero": choice.zero_stage}
    return {"told": describe(choice), "options": options}


def our_sides(case: Case, profile: Profile, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """By name, what each of our sides takes at a link speed."""
    return {
        "linear": pipelined(case, profile, "linear", cluster),
        "wave": pipelined(case, profile, "wave", cluster),
        "auto": pipelined(case, profile, "auto", cluster),
        "tuned": tuned(case, profile, cluster),
    }


def once_each(sides: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the name of a side before it, ``same_as``, where one runs that side's very plan.

    Such a plan is timed once: two of its timings differ by some hundredths, which tells nothing of the sides.
    """
    found: dict[str, dict[str, Any]] = {}
    first: list[tuple[Any, str]] = []
    for name, side in sides.items():
        plan = replace(Plan.from_json(side["options"]["plan"]), estimate=None, solver=None)
        runs = {**side["options"], "plan": plan}
        same = [other for others, other in first if others == runs]
        found[name] = {**side, "same_as": same[0]} if same else side
        first.append((runs, name))
    return found


def as_profile(case: Case) -> Profile:
    """Of the case's layers as they are asked to sleep, not measured."""
    source = {name: index for index, layer in enumerate(case.layers) for name, _ in layer.stashes}
    size = {name: count for layer in case.layers for name, count in layer.stashes}
    return Profile(
        name=case.name,
        device="none",
        dtype="float32",
        microbatch_size=1,
        layers=tuple(
            LayerCost(
                name=layer.name,
                forward_ms=layer.forward_ms,
                backward_ms=layer.input_ms + layer.weight_ms,
                weight_grad_ms=layer.weight_ms,
                input_grad_ms=layer.input_ms,
                param_bytes=layer.param_bytes,
                activation_bytes=layer.activation_bytes,
                output_bytes=layer.output_bytes,
            )
            for layer in case.layers
        ),
        skips=tuple(
            Skip(name=name, source=source[name], target=index, bytes=size[name])
            for index, layer in enumerate(case.layers)
            for name in layer.pops
        ),
    )
