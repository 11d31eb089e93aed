"""Optimizers and schedulers from config, client and factories, on two ranks, against torch in one process."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from support.parity import models, mse, share_groups
from support.reference import Unpartitioned, train

STEPS = 5


def optimizers(_: Any) -> None:
    share_groups()
    for name, case in OPTIMIZERS.items():
        losses, rates = trained(**case)
        expected, their_rates = expected_of(case)
        for a, b in zip([*losses, *rates], [*expected, *their_rates], strict=True):
            assert abs(a - b) <= 1e-5 * abs(b), (name, losses, expected, rates, their_rates)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(list(parameters), lr=1e-3)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def warming(optimizer: torch.optim.Optimizer) -> Any:
    """What upstream's WarmupLR of the config below does, which counts from the end of the first step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 4))


WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch_adam": {"twin": adamw, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}},
    "torch's by name": {"twin": sgd, "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}},
    "another by name": {"twin": rmsprop, "optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}},
    "the config's scheduler": {"twin": sgd, "client": sgd, "twin_scheduler": warming, "config_scheduler": WARMUP},
    "client's": {"twin": sgd, "client": sgd},
    "client's and its scheduler": {"twin": sgd, "client": sgd, "scheduler": halving, "is_instance": True},
    "factories": {"twin": sgd, "factory": sgd, "scheduler": halving},
    "factory under ZeRO-1": {"twin": adamw, "factory": adamw, "scheduler": halving, "stage": 1},
}


def trained(
    *,
    twin: Any,
    optimizer: Any = None,
    client: Any = None,
    factory: Any = None,
    scheduler: Any = None,
    twin_scheduler: Any = None,
    config_scheduler: Any = None,
    is_instance: bool = False,
    stage: int = 0,
) -> tuple[list[float], list[float]]:
    """Losses, and the learning rate before each step, of a toy over all ranks."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "pulse": {"solver_seconds": 0, "placement": "wave"},
        **({"optimizer": optimizer} if optimizer else {}),
        **({"scheduler": config_scheduler} if config_scheduler else {}),
    }
    layers, batch, _ = models("toy")
    module = PipelineModule(layers=layers(), num_stages=2, loss_fn=mse, seed_layers=True, config=config)
    made = factory if client is None else client(module.parameters())
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=made,
        lr_scheduler=scheduler(made) if is_instance else scheduler,
        model_parameters=list(module.parameters()),
        config=config,
    )
    losses, rates = [], []
    for step in range(STEPS):
        rates.append(engine.get_lr()[0])
        losses.append(float(engine.train_batch(batch(step, m, 0) for m in itertools.count()).detach()))
    engine.destroy()
    return losses, rates


def expected_of(case: dict[str, Any]) -> tuple[list[float], list[float]]:
    layers, batch, first = models("toy")
    model = Unpartitioned(layers())
    optimizer = case["twin"](model.parameters())
    make = case.get("twin_scheduler", case.get("scheduler"))
    scheduler = make(optimizer) if make else None
    losses, rates = [], []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(train(model, optimizer, [batch(step, m, 0) for m in range(3)], mse, 0.1, first)[0])
        if scheduler is not None:
            scheduler.step()
    return losses, rates
