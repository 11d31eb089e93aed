"""What ranks run in the test of replicas that read the same data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from support.cases import run_each
from torch import Tensor, nn


def told_of_same_data(cases: list[dict[str, Any]]) -> None:
    run_each(cases, trains)


def trains(case: dict[str, Any]) -> None:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0},
    }
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    loss_fn = nn.functional.mse_loss
    module = PipelineModule(layers, num_stages=case["P"], loss_fn=loss_fn, config=config)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), config=config
    )
    batches = data(case["own"], engine.grid.data_parallel_id)
    for _ in range(4):
        engine.train_batch(batches)
    engine.destroy()


def data(own: list[str], replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of a replica that has inputs or labels of its own, or neither."""
    for number in itertools.count():
        seeds = [number + 100 * replica * (name in own) for name in ("inputs", "labels")]
        made = [torch.Generator().manual_seed(seed) for seed in seeds]
        yield torch.randn(2, 4, generator=made[0]), torch.randn(2, 4, generator=made[1])
