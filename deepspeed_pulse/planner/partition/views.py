"""A profile as cuts may also see it: without skips, or with what its gradients take to reduce."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.layout import Grid
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.cost import data_parallel_link


def without_skips(profile: Profile) -> Profile:
    """Cuts balance time and hidden states; skips go where that sends them."""
    return replace(profile, skips=())


def with_reduction(profile: Profile, cluster: Cluster, grid: Grid, microbatches: int, *, share: float) -> Profile:
    """A ``share`` of the time to reduce a layer's gradients over data-parallel peers is work of its backward."""
    links = {data_parallel_link(cluster, grid, rank) for rank in range(grid.pipeline_ranks)}
    group, slowest = grid.data_parallel, max(link.bus_ms(10**9) for link in links)
    ms_per_byte = share * 2 * (group - 1) / group * slowest / 1e9 / microbatches
    layers = (replace(x, backward_ms=x.backward_ms + ms_per_byte * x.param_bytes) for x in profile.layers)
    return replace(profile, layers=tuple(layers))
