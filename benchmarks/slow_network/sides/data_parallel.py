"""Every rank holds the whole model: DeepSpeed's ZeRO-2, and torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from resting import Resting
from slow_network.cases import Case
from slow_network.layers import FLOAT_BYTES
from torch.nn.parallel import DistributedDataParallel

ZERO_BUCKET, DDP_BUCKET_BYTES = 500_000_000, 25 * 2**20
"""DeepSpeed's default, in elements, and torch's; scaled as the model's bytes are."""
MODEL_BYTES = 2
"""Of an element of the models (bfloat16); those of the benchmark have ``FLOAT_BYTES``."""


class Whole(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([kind(*arguments) for kind, *arguments in case.whole()])

    def forward(self, values: Any, label: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return torch.nn.functional.mse_loss(values, label)


def build(case: Case, *, zero: bool) -> Callable[[], None]:
    return _zero(case) if zero else _ddp(case)


def _zero(case: Case) -> Callable[[], None]:
    deepspeed.init_distributed("gloo")
    model, passes = Whole(case), case.microbatches // case.ranks
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": passes,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": int(ZERO_BUCKET * case.byte_scale * MODEL_BYTES / FLOAT_BYTES),
        },
    }
    optimizer = Resting(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = case.batch()

    def step() -> None:
        for _ in range(passes):
            engine.backward(engine(*inputs))
            engine.step()

    return step


def _ddp(case: Case) -> Callable[[], None]:
    passes = case.microbatches // case.ranks
    model = DistributedDataParallel(Whole(case), bucket_cap_mb=DDP_BUCKET_BYTES * case.byte_scale / 2**20)
    optimizer = Resting(model.parameters())
    inputs = case.batch()

    def step() -> None:
        for index in range(passes):
            with nullcontext() if index == passes - 1 else model.no_sync():
                model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
