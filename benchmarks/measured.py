"""Layer costs as a job measures them at its start: all ranks at the same time, each a share of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.plans.costs import PlanRequest
from deepspeed_pulse.engine.plans.measuring import measure_profiles
from deepspeed_pulse.engine.specs import Workload
from deepspeed_pulse.ir.profile import Profile


def measured_profiles(name: str, layers: Sequence[Any], inputs: Any, sizes: Sequence[int]) -> tuple[Profile, ...]:
    """A profile for each microbatch size; every rank of the default group calls it.

    Args:
        inputs: of a microbatch of one, the first layer's or a dict whose first entry is that.
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
        microbatch_size=1,
        partition_method="profile",
        example=(first, entries),
        device=torch.device("cpu"),
    )
    return measure_profiles(request, sizes)
