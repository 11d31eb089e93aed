"""What upstream's optimizers expect of gradients when a step of microbatches is over."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer


def complete_tied(module: Any, optimizer: Any) -> None:
    """Tied weights that no microbatch has reached here take part in the sum over their ranks."""
    for weight, _ in module.get_tied_weights_and_groups():
        if weight.requires_grad and weight.grad is None and not isinstance(optimizer, BF16_Optimizer):
            weight.grad = torch.zeros_like(weight)


def mark_replicated(module: torch.nn.Module, optimizer: Any) -> None:
    """Let gradients of tied weights count once in the norm: this optimizer looks for the mark on the gradient."""
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        for parameter in module.parameters():
            if parameter.grad is not None and getattr(parameter, "ds_pipe_replicated", False):
                parameter.grad.ds_pipe_replicated = True  # type: ignore[attr-defined]


def count_none_as_zero(optimizer: Any) -> None:
    """On a rank without any gradient this optimizer has no norm to add to the others'; its buffers hold zeros."""
    if isinstance(optimizer, BF16_Optimizer) and not any(map(any, optimizer.fp32_groups_has_gradients)):
        optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in optimizer.fp32_groups_has_gradients]
