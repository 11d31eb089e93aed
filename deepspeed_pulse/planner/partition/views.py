"""A profile as cuts may also see it: without skips, or with what its gradients take to reduce."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.job import Job
from deepspeed_pulse.planner.links import Links

_SHARES = (0.5, 1.0)
"""Of the time to reduce a layer's gradients, what counts as work of its backward."""


def other_views(job: Job, *, skipless: bool, weighed: bool) -> list[Profile]:
    """Views of a job's profile that bring other cuts than the profile itself.

    Args:
        skipless: also a balance of time and hidden states alone, which fast links want; skips go where that sends them.
        weighed: also, of all views, cuts that weigh what each rank has to reduce over its data-parallel peers.
    """
    views = [job.profile]
    if skipless:
        views.append(replace(job.profile, skips=()))
    if weighed:
        views += [_with_reduction(view, job, share) for view in views for share in _SHARES]
    return views[1:]


def _with_reduction(profile: Profile, job: Job, share: float) -> Profile:
    links = Links(job.cluster, job.grid)
    group, slowest = job.data_parallel, max(links.of_peers(rank).bus_ms(10**9) for rank in range(job.pipeline_ranks))
    ms_per_byte = share * 2 * (group - 1) / group * slowest / 1e9 / job.microbatches
    layers = (replace(x, backward_ms=x.backward_ms + ms_per_byte * x.param_bytes) for x in profile.layers)
    return replace(profile, layers=tuple(layers))
