"""What "auto" stands for in a job: measured by all ranks, chosen by rank 0, the same on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepspeed_pulse.engine.collectives import agree
from deepspeed_pulse.engine.plans.asked import Asked, sizes_to_measure
from deepspeed_pulse.engine.plans.costs import PlanRequest, known_profile
from deepspeed_pulse.engine.plans.measuring import measure_profiles
from deepspeed_pulse.engine.plans.planning import Planned, decide, job_cluster, open_job
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.choice import Choice, Decision, Option, Tuning
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.report.chosen import options, rejected


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What was chosen for "auto": ``options`` are the choice and its runner-ups, ``reasons`` why others were rejected.

    ``planned`` is None where the user's plan file settles everything; it is planned like any other then.
    """

    asked: Asked
    choice: Choice
    planned: Planned | None
    options: tuple[Option, ...] = ()
    reasons: tuple[str, ...] = ()


def choose(request: PlanRequest, asked: Asked, doing: Callable[[str], None]) -> Chosen:
    """The best way to run a job within what the user settled; all ranks call it and get the same, or the same error.

    Numbers of ranks and microbatches of ``request`` are not read, its ``microbatch_size`` is the example's.
    ``doing`` is told what comes next.
    """
    given = asked.given
    if request.pulse.plan is not None:
        assert given.pipeline_ranks and given.microbatch_size and given.microbatches and given.layout
        choice = Choice(
            pipeline_ranks=given.pipeline_ranks,
            data_parallel=asked.world // given.pipeline_ranks,
            waves=0,
            microbatch_size=given.microbatch_size,
            microbatches=given.microbatches,
            layout=given.layout,
        )
        return Chosen(asked=asked, choice=choice, planned=None)
    _check_costs(request, asked)
    profile, costs = agree(lambda: known_profile(request), "planning")
    doing("PipelineModule(): measuring layer costs")
    profiles = _measured(request, asked) if profile is None else (profile,)
    doing("PipelineModule(): measuring links")
    cluster = job_cluster(request, timed=True)
    doing('PipelineModule(): choosing what is "auto", on rank 0')
    return agree(lambda: _chosen(request, asked, profiles, cluster, costs), "choosing")


def _measured(request: PlanRequest, asked: Asked) -> tuple[Profile, ...]:
    """The smaller microbatch sizes, then two at a time as long as the larger one is worth it, and fits the memory."""
    sizes = sizes_to_measure(asked)
    if asked.given.sets_microbatches:
        return measure_profiles(request, sizes)
    found = measure_profiles(request, sizes[:_ALWAYS_MEASURED])
    for at in range(_ALWAYS_MEASURED, len(sizes), 2):
        if len(found) < at or _sample_ms(found[-1]) > _WORTH_MEASURING * _sample_ms(found[-2]):
            break
        found += measure_profiles(request, sizes[at : at + 2], found)
    return found


_ALWAYS_MEASURED = 4
"""So many sizes are measured first: on a busy machine a single one that looks slow says little."""

_WORTH_MEASURING = 0.95
"""Where a sample takes more than this share of its time in microbatches half as large, no larger ones are measured."""


def _sample_ms(profile: Profile) -> float:
    return sum(layer.forward_ms + layer.backward_ms for layer in profile.layers) / profile.microbatch_size


def _check_costs(request: PlanRequest, asked: Asked) -> None:
    """A choice needs times, and cuts of its own."""
    what = f'{asked.names[0]}: "auto"'
    if request.partition_method != "profile":
        raise ConfigError(
            f'{what} beside partition_method {request.partition_method!r}: cuts are chosen with it, by "profile"; '
            "leave partition_method out, or give numbers"
        )
    if request.pulse.profile == "auto" and request.example is None:
        raise ConfigError(
            f"{what} needs to know what layers cost: pass example_batch= to PipelineModule, or name a profile file in "
            'the "pulse" block ("profile")'
        )


def _chosen(request: PlanRequest, asked: Asked, profiles: Sequence[Profile], cluster: Cluster, costs: str) -> Chosen:
    job = open_job(request, asked, profiles, cluster)
    best = decide(job, request.pulse, told)
    sizes = ", ".join(str(profile.microbatch_size) for profile in profiles)
    profile, costs = job.sizes.at(best.choice.microbatch_size), f"{costs}, microbatches of {sizes}"
    planned = Planned(plan=best.plan, profile=profile, cluster=cluster, costs=costs)
    return Chosen(asked=asked, choice=best.choice, planned=planned, options=best.options, reasons=best.reasons)


def told(tuning: Tuning) -> Decision:
    best = tuning.best
    return Decision(choice=best.choice, plan=best.planned, options=options(tuning), reasons=rejected(tuning))
