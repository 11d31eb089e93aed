"""A few real steps of a choice: what ``ds_pulse tune --verify`` runs on every rank."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_pulse.engine.module import PipelineModule
from deepspeed_pulse.engine.plans.profiles import filled, on_device
from deepspeed_pulse.engine.specs import LayerSpec, Workload, describe, unwrap
from deepspeed_pulse.runtime.payload import map_tensors, tensors_in

WARM_UP = 2
"""Steps that are not counted: the first ones connect ranks and allocate."""

SETTINGS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}
"""What a choice leaves to the user; Adam, for its state is what plans count."""


def available() -> tuple[str, int]:
    """What ranks run on here, and how many find room: accelerators, or without any the cores of this process."""
    accelerator = get_accelerator()
    name = str(accelerator.device_name())
    if name != "cpu":
        return name, int(accelerator.device_count())
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return name, os.cpu_count() or 1 if affinity is None else len(affinity(0))


class _Filled(LayerSpec):
    """A layer from the meta device; each build is a copy with random weights, for the rank that holds it."""

    def __init__(self, index: int, layer: Any) -> None:
        declared = describe(index, layer)
        self._module: nn.Module = unwrap(layer)
        super().__init__(type(self._module), stash=declared.stash, pop=declared.pop, layer_name=declared.name)

    def build(self, log: bool = False) -> nn.Module:
        on_meta = torch.get_default_device().type == "meta"
        return self._module if on_meta else on_device(self._module, torch.device("cpu"))


def step_times(job: Workload, config: dict[str, Any], *, pipeline_ranks: int, steps: int) -> list[float]:
    """ms of each step, the slowest rank's, with DeepSpeed's settings and a plan in ``config``. Collective.

    Layers and batch may be on the meta device; the loss is the mean of the squared output.
    """
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    settings = {**SETTINGS, **config}
    layers = [_Filled(i, layer) if _is_meta(layer) else layer for i, layer in enumerate(job.layers)]
    module = PipelineModule(
        layers=layers,
        num_stages=pipeline_ranks,
        loss_fn=lambda output, _: torch.stack([t.float().square().mean() for t in tensors_in(output)]).sum(),
        config=settings,
    )
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=settings)
    data = itertools.repeat((_with_numbers(job.batch[0]), torch.zeros(1)))  # the loss does not read labels
    found = []
    for _ in range(WARM_UP + steps):
        deepspeed.comm.barrier()
        get_accelerator().synchronize()
        start = time.perf_counter()
        engine.train_batch(data)
        get_accelerator().synchronize()
        took = torch.tensor((time.perf_counter() - start) * 1e3, device=engine.device)
        deepspeed.comm.all_reduce(took, op=deepspeed.comm.ReduceOp.MAX)
        found.append(float(took))
    return found[WARM_UP:]


def _is_meta(layer: Any) -> bool:
    module = unwrap(layer)
    return isinstance(module, nn.Module) and any(p.is_meta for p in module.parameters())


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_numbers(entry) for name, entry in value.items()}
    return map_tensors(value, lambda tensor: filled(tensor, torch.device("cpu")))
