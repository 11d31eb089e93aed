"""The front door: a Plan from a job. Used by the engine and the command line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_pulse.errors import ConfigError, InfeasibleError, did_you_mean
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.codec import to_data
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.schedule import Schedule
from deepspeed_pulse.planner.cache import file_of, kept
from deepspeed_pulse.planner.garbage import rare_collections
from deepspeed_pulse.planner.job import DEFAULTS, Job, Progress, SearchOptions
from deepspeed_pulse.planner.making.best import best_plan
from deepspeed_pulse.planner.making.maker import Maker, are_few
from deepspeed_pulse.planner.making.ordered import ordered
from deepspeed_pulse.planner.partition.cuts import require_layers
from deepspeed_pulse.planner.recompute import recomputed_layers
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS, forward_only, generators_for, halves_tried

MOST_STAGES = 10_000
MOST_RIVAL_FORWARDS = 1_500
"""Of placements that are tried beside others, so that planning stays within seconds."""

MOST_DIRECTED = 4
"""Backbones whose directions are all tried."""

MOST_FORWARDS = 500_000
"""Stages times microbatches of an order that is made in minutes and a few GB."""


@rare_collections()
def make_plan(
    job: Job,
    options: SearchOptions = DEFAULTS,
    *,
    progress: Progress | None = None,
    plan_cache: str | Path | None = None,
) -> Plan:
    """Cuts, order, routes and estimate for a model on ``pipeline_ranks`` x ``data_parallel`` ranks of a cluster.

    ``plan_cache``: folder in which plans that took time to solve are kept by content.

    Raises:
        ConfigError: the job or an option is unusable.
        InfeasibleError: too few layers or too little memory; says what would be needed.
        TooSlow: cuts that fit the memory are slower than ``within_ms``.
    """
    maker, places = _maker(job, options, progress)
    rivals = _rivals(job, options)
    if plan_cache is None or options.solver_seconds <= 0:
        return best_plan(maker, places, rivals)
    # The file is named by everything that the plan depends on.
    known, settings = vars(maker.job).copy(), vars(maker.options)
    profile, cluster = known.pop("profile"), known.pop("cluster")
    known |= {"rules": to_data(job.rules), "frozen": [to_data(part) for part in job.frozen]}
    conditioning = [to_data(one) for one in known.pop("conditioning")]
    known |= {"conditioning": conditioning} if conditioning else {}
    file = file_of(plan_cache, Plan, [profile], cluster, places=places, **known, **settings)
    return kept(file, Plan, lambda: best_plan(maker, places, rivals))


def cuts(job: Job, options: SearchOptions) -> tuple[int, ...]:
    """The partitioner's boundaries, of the only placement or the first; without an order.

    Raises:
        ConfigError, InfeasibleError: as for :func:`make_plan`.
    """
    maker, places = _maker(job, options, None)
    return maker.cut(places[0], job.profile).boundaries


def rival(job: Job, options: SearchOptions, within_ms: float) -> Plan | None:
    """A plan of known orders for the only placement, several waves or a loop, if its step takes no longer than that.

    Raises:
        ConfigError, InfeasibleError: as for :func:`make_plan`.
    """
    maker, places = _maker(job, options, None)
    return maker.rival(places[0], within_ms)


def _maker(job: Job, options: SearchOptions, progress: Progress | None) -> tuple[Maker, list[Placement]]:
    """What makes the plan, and the placements that it tries."""
    ranks, waves = job.pipeline_ranks, options.waves
    check_counts(pipeline_ranks=ranks, microbatches=job.microbatches, data_parallel=job.data_parallel, waves=waves)
    check_cluster(job.cluster, ranks * job.data_parallel, "pipeline ranks x data-parallel =")
    _check_stages(job.profile, ranks, waves)
    places = _placements(job, options)
    _check_forwards(max(map(len, places)), job.microbatches)
    maker = Maker(
        job=job,
        options=options,
        recompute=recomputed_layers(job.profile, job.recompute),
        progress=progress,
    )
    return maker, places


@rare_collections()
def reorder(plan: Plan, job: Job, options: SearchOptions = DEFAULTS) -> Plan:
    """The same cuts, placement, routes, rules and frozen parts in another order, for the job's microbatches."""
    check_counts(microbatches=job.microbatches)
    _check_forwards(plan.num_stages, job.microbatches)
    frozen = () if plan.fill is None else plan.fill.parts
    bare = tuple(replace(one, microbatches=()) for one in plan.conditioning)
    plan = replace(plan, microbatches=job.microbatches, conditioning=bare)
    return ordered(plan, replace(job, frozen=frozen, conditioning=bare), options)


def forward_schedule(plan: Plan, microbatches: int) -> Schedule:
    """Forwards only, for evaluation, extra ones as in the plan; deadlock-free on any placement."""
    check_counts(microbatches=microbatches)
    extra = [plan.extra_forwards(stages[0]) for stages in plan.placement.backbones]
    return forward_only(plan.placement, microbatches, extra)


def check_counts(**counts: int) -> None:
    """Raise a :class:`ConfigError` for one that is no whole number above 0."""
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


def check_cluster(cluster: Cluster, num_ranks: int, what: str) -> None:
    """Raise a :class:`ConfigError` where the cluster has fewer ranks."""
    if num_ranks > cluster.num_ranks:
        raise ConfigError(
            f"{what} {num_ranks} ranks, the cluster {cluster.name!r} has {cluster.num_ranks} "
            f"({cluster.nodes} nodes of {cluster.ranks_per_node}); use fewer ranks or another cluster file"
        )


def _placements(job: Job, options: SearchOptions) -> list[Placement]:
    """What to try, the preferred first. Raises when nothing can work."""
    profile, ranks, waves = job.profile, job.pipeline_ranks, options.waves
    placement, schedule = options.placement, options.schedule
    if profile.backbones:
        return _placements_of_several(job, options)
    wave, linear, loop = Placement.wave(ranks, waves), Placement.linear(ranks), Placement.loop(ranks, 2 * waves)
    known = {"auto": [wave, linear], "wave": [wave], "linear": [linear], "loop": [loop]}
    if placement not in known:
        raise _no_placement(placement, known)
    places = known[placement]
    if placement == "auto" and schedule == "interleaved":
        places = [loop]
    if options.boundaries is not None:
        places = _that_fit_boundaries(profile, places, options.boundaries)
    if placement == "auto":
        if schedule in GENERATORS:
            places = [place for place in places if GENERATORS[schedule].fits(place)] or places
        enough = [place for place in places if profile.num_layers >= len(place)]
        places = enough or places[-1:]
    for place in places:
        require_layers(profile, place)
        generators_for(schedule, place, split=halves_tried(options, profile)[-1])
    return places


def _placements_of_several(job: Job, options: SearchOptions) -> list[Placement]:
    """Of several backbones: all as waves, or all linear; each but the first in the same direction or the opposite.

    Between backbones nothing passes, so opposite ones fill each other's idle ranks at a step's start and end.
    """
    profile, ranks = job.profile, job.pipeline_ranks
    known = {"wave": Placement.wave(ranks, options.waves), "linear": Placement.linear(ranks)}
    known["loop"] = Placement.loop(ranks, 2 * options.waves)
    kinds = ["wave", "linear"] if options.placement == "auto" else [options.placement]
    if kinds[0] not in known:
        raise _no_placement(options.placement, ["auto", *known])
    found: list[Placement] = []
    for one in (known[kind] for kind in kinds):
        ways = [one, one.mirrored] if ranks > 1 else [one]
        count = len(profile.backbones)
        # with many backbones, as many of each direction, or all in one
        combined = (
            itertools.product(ways, repeat=count - 1)
            if count <= MOST_DIRECTED
            else [(ways * count)[1:count], (one,) * (count - 1)]
        )
        found += [Placement.of_backbones([one, *others]) for others in combined]
    if options.boundaries is not None:
        found = _that_fit_boundaries(profile, found, options.boundaries)
    fitting = [place for place in found if _has_layers(profile, place)] or found[-1:]
    for place in fitting:
        for index, part in enumerate(place.parts):
            require_layers(profile.part(index), part)
        generators_for(options.schedule, place, split=halves_tried(options, profile)[-1])
    return fitting


def _has_layers(profile: Profile, place: Placement) -> bool:
    """Every backbone has as many layers as stages."""
    return all(profile.part(index).num_layers >= len(part) for index, part in enumerate(place.parts))


def _no_placement(placement: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"placement: expected one of {', '.join(known)}, found {placement!r}{did_you_mean(placement, known)}"
    )


def _rivals(job: Job, options: SearchOptions) -> list[Placement]:
    """What "auto" tries beside a wave and a linear placement: fill and drain are shorter with more stages a rank.

    They send more, part skips, and their cuts take seconds to find: so where microbatches are few.
    """
    ranks, schedule = job.pipeline_ranks, options.schedule
    settled = (
        job.profile.backbones or options.placement != "auto" or options.waves > 1 or options.boundaries is not None
    )
    if settled or schedule == "interleaved" or not are_few(job.microbatches, ranks):
        return []
    places = [Placement.wave(ranks, 2), Placement.loop(ranks, 2), Placement.loop(ranks, 4)]
    fitting = [place for place in places if schedule == "auto" or GENERATORS[schedule].fits(place)]
    return [
        place
        for place in fitting
        if len(place) <= job.profile.num_layers and len(place) * job.microbatches <= MOST_RIVAL_FORWARDS
    ]


def _that_fit_boundaries(profile: Profile, places: list[Placement], boundaries: Sequence[int]) -> list[Placement]:
    cuts = list(boundaries)
    if not cuts or cuts[0] != 0 or cuts[-1] != profile.num_layers or any(a >= b for a, b in itertools.pairwise(cuts)):
        raise ConfigError(
            f"boundaries: expected strictly increasing layer indices from 0 to the layer count {profile.num_layers}, "
            f"found {cuts}"
        )
    fitting = [place for place in places if len(place) == len(cuts) - 1]
    if fitting and profile.backbones:
        fitting = [
            place
            for place in fitting
            if all(cuts[s] == part.layers[0] for s, part in zip(place.starts, profile.backbones, strict=True))
        ]
        if not fitting:
            starts = ", ".join(f"{part.layers[0]} ({part.name})" for part in profile.backbones)
            raise ConfigError(
                f"boundaries: expected the same number of stages for each backbone, which begin at layers {starts}; "
                f"found {cuts}"
            )
    if not fitting:
        expected = " or ".join(f"{len(place) - 1} ({place.name} placement)" for place in places)
        raise ConfigError(f"boundaries: expected {expected} inner cuts, found {len(cuts) - 2}: {cuts[1:-1]}")
    return fitting
