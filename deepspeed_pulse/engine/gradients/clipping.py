"""Gradient clipping over all pipeline ranks (upstream's fp32 path counts pipeline rank 0 only)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm as dist


def clip_over_pipeline(parameters: Iterable[torch.nn.Parameter], max_norm: float, group: Any) -> torch.Tensor:
    """Scale gradients so that the norm over all ranks of the pipeline is at most ``max_norm``.

    A weight tied between ranks counts once: upstream marks its copies ``ds_pipe_replicated``. Called
    after the data-parallel reduction, so the result is the same on every pipeline.

    Returns:
        The norm before clipping, a scalar tensor.
    """
    found = [p for p in parameters if p.grad is not None]
    device = found[0].grad.device if found and found[0].grad is not None else torch.device("cpu")
    square = torch.zeros((), dtype=torch.float32, device=device)
    for parameter in found:
        if not getattr(parameter, "ds_pipe_replicated", False) and parameter.grad is not None:
            square += parameter.grad.detach().float().square().sum()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in found:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm
