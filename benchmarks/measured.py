"""Layer costs as a job measures them at its start: all ranks at the same time, each a share of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.plans.costs import PlanRequest
from deepspeed_pulse.engine.plans.measuring import measure_profiles
from deepspeed_pulse.engine.specs import Workload
from deepspeed_pulse.ir.profile import Profile

CPU = torch.device("cpu")


def measured_profiles(
    name: str,
    layers: Sequence[Any],
    inputs: Any,
    sizes: Sequence[int],
    *,
    microbatch_size: int = 1,
    device: torch.device = CPU,
    adam: bool = False,
) -> tuple[Profile, ...]:
    """A profile for each microbatch size; every rank of the default group calls it.

    Args:
        inputs: of a microbatch, the first layer's or a dict whose first entry is that; dotted names for inner dicts.
        microbatch_size: samples in it.
        device: what layers are measured on.
        adam: what trains is torch's AdamW. Without, the optimizer takes no time: one that rests.
    """
    first, entries = inputs, {}
    if isinstance(inputs, dict):
        (_, first), *others = inputs.items()
        entries = dict(others)
    request = PlanRequest(
        graph=Workload(name=name, layers=layers, batch=None).graph,
        layers=layers,
        pulse=PulseConfig(),
        pipeline_ranks=1,
        data_parallel=torch.distributed.get_world_size(),
        microbatches=1,
        microbatch_size=microbatch_size,
        partition_method="profile",
        example=(first, entries),
        device=device,
    )
    found = measure_profiles(request, sizes)
    return found if adam else tuple(replace(profile, optimizer_ms_per_gb=0.0) for profile in found)
