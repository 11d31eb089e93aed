"""Making the plan of a module: all ranks measure, rank 0 plans and checks, all ranks receive the same.

The only place of the engine that imports the planner.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse import planner
from deepspeed_pulse.config import START_SECONDS, PulseConfig
from deepspeed_pulse.engine.collectives import agree, told_by_all
from deepspeed_pulse.engine.conditioning import for_evaluation
from deepspeed_pulse.engine.measure.hardware import NO_LIMIT_BYTES
from deepspeed_pulse.engine.plans.asked import Asked
from deepspeed_pulse.engine.plans.costs import NO_DEVICE, PlanRequest, known_profile, upstream_cuts
from deepspeed_pulse.engine.plans.machines import machines, with_communicators
from deepspeed_pulse.engine.plans.measuring import measure_profiles
from deepspeed_pulse.errors import ConfigError, PlanError
from deepspeed_pulse.ir.buckets import BUCKET_BYTES
from deepspeed_pulse.ir.carried import with_carried
from deepspeed_pulse.ir.choice import Decision, Tuning
from deepspeed_pulse.ir.cluster import MEASURED, Cluster
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.codec import to_data
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Held, Profile
from deepspeed_pulse.ir.run import Difference, MeasuredStep
from deepspeed_pulse.ir.schedule import Schedule
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner import Job, OpenJob, SearchOptions, check, estimate, simulate, tune
from deepspeed_pulse.planner.cache import file_of, kept
from deepspeed_pulse.planner.cost import default_cluster
from deepspeed_pulse.planner.explain import explain
from deepspeed_pulse.planner.problem import other_backbones
from deepspeed_pulse.planner.recompute import held_in_actions
from deepspeed_pulse.planner.tuning.sizes import scaled


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, the costs it was made for, and how they were found."""

    plan: Plan
    profile: Profile | None
    cluster: Cluster | None
    costs: str

    @property
    def measured(self) -> bool:
        """True when costs are times, so that predicted times mean something."""
        return self.profile is not None and self.profile.device != NO_DEVICE

    @property
    def sources(self) -> str:
        """How costs were found and how much a layer's times varied, and the links where they were measured."""
        parts = [self.costs]
        spreads = [layer.spread for layer in self.profile.layers if layer.spread is not None] if self.profile else []
        if spreads:
            parts.append(f"a layer's times differ by {statistics.median(spreads):.0%} of their median")
        if self.cluster is not None and self.cluster.name == MEASURED:
            parts.append(f"links measured: {_links(self.cluster)}")
        return "; ".join(parts)


def _links(cluster: Cluster) -> str:
    inside = ("inside a node", cluster.intra_node, cluster.ranks_per_node > 1)
    between = ("between nodes", cluster.inter_node, cluster.nodes > 1)
    return ", ".join(
        f"{link.bandwidth_gb_per_s:.3g} GB/s after {link.latency_us:.0f} us {where}"
        for where, link, exists in (inside, between)
        if exists
    )


def plan_job(request: PlanRequest, doing: Callable[[str], None]) -> Planned:
    """The plan for a job; all ranks of the world call it and get the same, or the same error.

    Layer costs are measured by all ranks, everything else is done by rank 0. ``doing`` is told what comes next.
    """
    if request.pulse.plan is not None:
        return agree(lambda: _given(request), "planning")
    profile, costs = agree(lambda: _profile_of_size(request), "planning")
    if profile is None:
        doing("PipelineModule(): measuring layer costs")
        (profile,) = measure_profiles(request, [request.microbatch_size])
    doing("PipelineModule(): measuring links")
    cluster = job_cluster(request, timed=profile.device != NO_DEVICE)
    doing("PipelineModule(): planning on rank 0")
    return agree(lambda: make_planned(request, profile, cluster, costs), "planning")


def _profile_of_size(request: PlanRequest) -> tuple[Profile | None, str]:
    """What is known without measuring, for the job's microbatches: in proportion where their size is a multiple."""
    profile, found = known_profile(request)
    if profile is None or profile.device == NO_DEVICE or profile.microbatch_size == request.microbatch_size:
        return profile, found
    if request.microbatch_size % profile.microbatch_size:
        raise ConfigError(
            f"{request.pulse.profile}: expected costs of microbatches of {request.microbatch_size} samples as the job "
            "runs (train_micro_batch_size_per_gpu), or of a size that divides that, found of "
            f'{profile.microbatch_size}; profile with --microbatch-size, or set "profile": "auto"'
        )
    return scaled(profile, request.microbatch_size), f"{found}, scaled from microbatches of {profile.microbatch_size}"


def job_cluster(request: PlanRequest, *, timed: bool) -> Cluster:
    """The machines of a job, with the memory that a rank may use; all ranks of the world call it.

    Links are worth measuring only where layer costs are times (``timed``).
    """
    if request.pulse.cluster == "auto" and timed and dist.get_world_size() > 1:
        cluster = machines(request.device, plan_cache=request.pulse.plan_cache)
        given = _given_bytes(request)
        cluster = cluster if given is None else replace(cluster, memory_bytes=given)
    else:
        least = None if request.device.type == "cpu" else min(told_by_all(int(get_accelerator().total_memory())))
        cluster = agree(lambda: known_cluster(request, least), "planning")
    return agree(lambda: with_communicators(cluster, request.pulse), "planning")


def _given_bytes(request: PlanRequest) -> int | None:
    return None if request.pulse.memory_gb == "auto" else round(float(request.pulse.memory_gb) * 1e9)


def make_planned(request: PlanRequest, profile: Profile, cluster: Cluster, costs: str) -> Planned:
    """A new plan, or one that was kept; ``costs``: how the profile was found."""
    job = Job(
        profile=profile,
        cluster=cluster,
        pipeline_ranks=request.pipeline_ranks,
        microbatches=request.microbatches,
        data_parallel=request.data_parallel,
        layout=request.layout,
        rules=request.rules,
        recompute=request.recompute,
        frozen=request.frozen,
        conditioning=request.conditioning,
    )
    options = SearchOptions(
        placement=_placement(request, profile),
        waves=int(request.pulse.waves),
        boundaries=_explicit_cuts(request),
        schedule=request.pulse.schedule,
        split_backward=request.pulse.halves,
        solver_seconds=request.pulse.solver_seconds,
        backbone_steps=request.pulse.backbone_steps,
    )
    plan = planner.make_plan(job, options, plan_cache=request.pulse.plan_cache)
    if profile.device == NO_DEVICE and plan.bucket_bytes != BUCKET_BYTES:  # nobody knows what smaller ones would save
        plan = replace(plan, bucket_bytes=BUCKET_BYTES)
        plan = replace(plan, estimate=estimate(plan, profile, cluster))
    return Planned(plan=plan, profile=profile, cluster=cluster, costs=costs)


def _placement(request: PlanRequest, profile: Profile) -> str:
    """As asked for; a wave where nothing says how large a skip is, as all would look free to send."""
    pulse, stages = request.pulse, 2 * request.pipeline_ranks * int(request.pulse.waves)
    is_open = pulse.placement == "auto" and pulse.schedule == "auto" and _explicit_cuts(request) is None
    unknown = profile.device == NO_DEVICE and profile.skips and not profile.backbones
    return "wave" if is_open and unknown and stages <= profile.num_layers else pulse.placement


def open_job(request: PlanRequest, asked: Asked, profiles: Sequence[Profile], cluster: Cluster) -> OpenJob:
    """What is to be chosen, and from what."""
    recompute = None if isinstance(request.recompute, str) else tuple(request.recompute)
    given = replace(asked.given, recompute=recompute, reduce_early=request.rules.reduce_early)
    batch, world = asked.global_batch, asked.world
    return OpenJob(profiles=profiles, cluster=cluster, global_batch=batch, world_size=world, given=given)


def decide(job: OpenJob, pulse: PulseConfig, told: Callable[[Tuning], Decision]) -> Decision:
    """What is ``told`` of the best way to run a job, searched for ``solver_seconds``, or was of an earlier run.

    All other ranks wait for it. Choices are tried for half of what they wait for, without the search.
    """
    seconds = pulse.solver_seconds
    most = (max(pulse.timeout_seconds, START_SECONDS) - seconds) / 2
    if pulse.plan_cache is None:
        return told(tune(job, solver_seconds=seconds, most_seconds=most))
    asked = {"global_batch": job.global_batch, "world": job.world, "given": to_data(job.given)}
    path = file_of(pulse.plan_cache, Decision, job.profiles, job.cluster, solver_seconds=seconds, **asked)
    return kept(path, Decision, lambda: told(tune(job, solver_seconds=seconds, most_seconds=most)))


def recomputing(planned: Planned, plan: Plan, layers: Sequence[int]) -> Plan:
    """A plan of the same cuts and order that recomputes these layers in backward, predicted anew."""
    found, profile, cluster = replace(plan, recompute=tuple(layers), estimate=None), planned.profile, planned.cluster
    return found if profile is None or cluster is None else replace(found, estimate=estimate(found, profile, cluster))


def reorder(planned: Planned, pulse: PulseConfig, microbatches: int) -> Plan:
    """The same cuts with another number of microbatches."""
    check_may_differ(planned, pulse, microbatches)
    assert planned.profile is not None and planned.cluster is not None
    job = Job.of(planned.plan, planned.profile, planned.cluster, microbatches=microbatches)
    options = SearchOptions(
        schedule=pulse.schedule,
        split_backward=pulse.halves,
        solver_seconds=pulse.solver_seconds,
        backbone_steps=pulse.backbone_steps,
    )
    return planner.reorder(planned.plan, job, options)


def check_may_differ(planned: Planned, pulse: PulseConfig, microbatches: int) -> None:
    """Raise a ConfigError for a plan that the user gave: it holds for its own number of microbatches only."""
    if planned.profile is None or planned.cluster is None:
        raise ConfigError(
            f"the plan {pulse.plan} is for {planned.plan.microbatches} microbatches, the engine runs {microbatches}: "
            f'set gradient_accumulation_steps to {planned.plan.microbatches} or remove "plan" from the "pulse" block'
        )


def evaluation_plan(planned: Planned, pulse: PulseConfig, microbatches: int, seed: int) -> Plan:
    """The same cuts, forwards only; nothing is solved, as no order of forwards is better than another.

    ``seed``: by which microbatches are drawn that get an estimate.
    """
    if microbatches != planned.plan.microbatches:
        check_may_differ(planned, pulse, microbatches)
    plan = with_carried(for_evaluation(planned.plan, seed, microbatches), ())
    return with_schedule(plan, planner.forward_schedule(plan, microbatches), microbatches)


def _given(request: PlanRequest) -> Planned:
    path = str(request.pulse.plan)
    plan = Plan.load(path)
    for name in ("pipeline_ranks", "data_parallel", "microbatches", "microbatch_size"):
        expected, found = getattr(request, name), getattr(plan, name)
        if found != expected:
            raise PlanError(
                f"{path}: field {name!r}: expected {expected} as this job runs, found {found}; plan anew with "
                "ds_pulse plan, or change the job",
                more="plan-of-another-job",
            )
    if plan.carries and request.pulse.backbone_steps == "together":
        raise PlanError(
            f'{path}: its backbones make steps of their own: set "backbone_steps": "each" in the "pulse" block, or '
            "plan anew"
        )
    if (plan.fill is None) == request.has_frozen:
        have, lacks = ("the module", "the plan") if request.has_frozen else ("the plan", "the module")
        raise PlanError(
            f"{path}: {have} has frozen parts, {lacks} has none; plan with ds_pulse plan --frozen exactly where "
            "PipelineModule(..., frozen=) names parts"
        )
    try:
        check(plan, num_layers=len(request.graph.layers), values=request.graph.values)
        other = other_backbones(plan, request.backbones, "the module")
        if other is not None:
            raise PlanError(other)
    except PlanError as problem:
        raise PlanError(f'{path}: {problem}\nplan anew with ds_pulse plan, or remove "plan" from the block') from None
    asked = () if isinstance(request.recompute, str) else tuple(request.recompute)
    plan = replace(plan, rules=request.rules, recompute=plan.recompute or asked)
    return Planned(plan=plan, profile=None, cluster=None, costs=f"plan file {path}")


def held(planned: Planned, interval: int) -> dict[tuple[bool, bool], tuple[Held, ...]]:
    """Per stage, what its backward holds while it runs, as profiled; nothing without a profile.

    By whether it runs in halves, and whether it makes gradients of weights where none are.
    """
    if planned.profile is None:
        return {}
    profile, plan, interval = planned.profile, planned.plan, max(1, interval)
    return {
        (split, fresh): held_in_actions(profile, plan, split=split, interval=interval, fresh=fresh)
        for split, fresh in itertools.product((False, True), repeat=2)
    }


def _explicit_cuts(request: PlanRequest) -> tuple[int, ...] | None:
    method = request.partition_method
    if isinstance(method, str):  # one stage a rank: a program that names upstream's method gets upstream's stages
        return upstream_cuts(request) if request.pulse.placement == "linear" else None
    cuts = tuple(cut if isinstance(cut, int) else request.graph.index_of(cut) for cut in method)
    return (0, *cuts, len(request.layers))


def known_cluster(request: PlanRequest, least: int | None = None) -> Cluster:
    """What needs no measuring, with the memory that a rank may use, so that another order keeps to it too.

    ``least``: bytes that each rank's device has at least; None: there are none of its own.
    """
    given = _given_bytes(request)
    if request.pulse.cluster == "auto":
        memory = given or least or NO_LIMIT_BYTES
        return default_cluster(request.pipeline_ranks * request.data_parallel, memory)
    cluster = load_cluster(request.pulse.cluster)
    # a file says what may be used of the devices, but they cannot hold more than they do
    return replace(cluster, memory_bytes=given or min(cluster.memory_bytes, least or cluster.memory_bytes))


def with_schedule(plan: Plan, schedule: Schedule, microbatches: int) -> Plan:
    """The plan with another order, for example of forwards only."""
    return replace(plan, schedule=schedule, microbatches=microbatches, fill=None, estimate=None, solver=None)


def planned_timeline(planned: Planned, plan: Plan) -> Timeline | None:
    """The simulated timeline of a plan; None when its costs are no times."""
    if not planned.measured or planned.profile is None or planned.cluster is None:
        return None
    return simulate(plan, planned.profile, planned.cluster)


def with_neighbours_ms(planned: Planned) -> float | None:
    """A step where the ranks of a pipeline are neighbours, ms; None unless that is planned as clearly faster.

    Hosts hold neighbours. By upstream's numbering these are replicas, and all messages of pipelines go between hosts.
    """
    plan, profile, cluster = planned.plan, planned.profile, planned.cluster
    if not planned.measured or profile is None or cluster is None or cluster.nodes == 1 or plan.data_parallel == 1:
        return None
    if plan.estimate is None or plan.layout is Layout.DATA_MAJOR:
        return None
    found = estimate(replace(plan, layout=Layout.DATA_MAJOR, estimate=None), profile, cluster).step_ms
    return found if found < _CLEARLY_FASTER * plan.estimate.step_ms else None


_CLEARLY_FASTER = 0.95
"""What differs by less is not worth another numbering of the ranks."""


def difference(planned: Planned, plan: Plan, measured: MeasuredStep) -> Difference | None:
    """Why a measured step took another time, or other memory, than planned; None where nothing was predicted."""
    profile, cluster, peaks = planned.profile, planned.cluster, [rank.peak_parts for rank in measured.ranks]
    if not planned.measured or profile is None or cluster is None:
        return None
    if len(measured.timeline.spans) < sum(map(len, plan.schedule)):  # the first step of several that run on
        return None
    return explain(plan, profile, cluster, measured.timeline, step_ms=measured.step_ms, peaks=peaks)
