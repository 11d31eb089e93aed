"""DeepSpeed without pipelines, and without this package: two ranks train as one process of torch does."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

STEPS, MICROBATCHES, WIDTH, LR = 3, 2, 6, 0.05
PRECISIONS: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "fp32": ({}, torch.float32, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16, 5e-3),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 4}}, torch.float16, 1e-3),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, torch.float32, 5e-3),
}
"""By name: a block of the config, what the batch is made of, and how far weights may be."""

SHARDED: list[dict[str, Any]] = [{"stage": 1}, {"stage": 1, "reduce_scatter": False}, {"stage": 2}]

ZERO = {"fp32": [{"stage": 0}, *SHARDED], "autocast": [{"stage": 0}, *SHARDED], "bf16": SHARDED, "fp16": SHARDED}
"""By precision. In half precision without ZeRO, upstream's fused Adam counts its first step as the second."""


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int, microbatch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def expected(ranks: int) -> list[torch.Tensor]:
    """Weights after all steps, of torch on the CPU."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            for rank in range(ranks):
                x, y = batch(step, microbatch, rank)
                (nn.functional.mse_loss(trained(x), y) / (MICROBATCHES * ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in trained.parameters()]


def found(precision: str, zero: dict[str, Any]) -> list[torch.Tensor]:
    """Weights after all steps, of DeepSpeed with its own fused optimizer."""
    import deepspeed

    block, dtype, _ = PRECISIONS[precision]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": zero,
        **copy.deepcopy(block),
    }
    trained = model()
    engine = deepspeed.initialize(model=trained, model_parameters=trained.parameters(), config=config)[0]
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x, y = (part.to(engine.device, dtype) for part in batch(step, microbatch, engine.global_rank))
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
    weights = [parameter.detach().float().cpu() for parameter in engine.module.parameters()]
    engine.destroy()
    return weights


def trains(_: Any) -> None:
    import deepspeed

    deepspeed.init_distributed()
    wanted = expected(torch.distributed.get_world_size())
    for precision, (_block, _dtype, within) in PRECISIONS.items():
        for zero in ZERO[precision]:
            for weight, given in zip(wanted, found(precision, zero), strict=True):
                assert torch.allclose(weight, given, atol=within, rtol=within), (precision, zero, weight - given)
    assert "deepspeed_pulse" not in sys.modules
    print("PASSED", flush=True)
