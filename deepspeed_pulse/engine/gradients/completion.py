"""What becomes of gradients when a step of microbatches is over: what upstream's optimizers expect, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

Tied = Sequence[tuple[torch.Tensor, Any]]
"""Weights, each with the group of the ranks that hold copies of it."""


def complete(optimizer: Any) -> None:
    """What no microbatch has used here takes part in the sum over replicas: the data of others may have used it.

    Upstream's ZeRO fills its buckets with what has a gradient, so replicas would add up different parameters. Its
    optimizer for bf16 clips, and counts in the norm, what it was told has one.
    """
    if isinstance(optimizer, BF16_Optimizer):
        for has in optimizer.fp32_groups_has_gradients:
            has[:] = [True] * len(has)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for parameter in (p for group in optimizer.bit16_groups for p in group if p.requires_grad):
            _complete(parameter, optimizer)


def sum_tied(tied: Tied, optimizer: Any) -> None:
    """Add up gradients of tied weights over the ranks that hold copies, where a microbatch has reached them or not."""
    in_full_precision = isinstance(optimizer, BF16_Optimizer)
    if in_full_precision:
        _find_in_full_precision([weight for weight, _ in tied], optimizer)
    for weight, group in tied:
        # one that was frozen when the optimizer was made has no sum there, on no rank
        gradient = getattr(weight, "_hp_grad", None) if in_full_precision else _complete(weight, optimizer)
        if gradient is None:
            continue
        rows = gradient.contiguous()  # itself, unless it lies in channels_last, say, which not every backend takes
        dist.all_reduce(rows, group=group)
        if rows is not gradient:
            gradient.copy_(rows)


def _complete(weight: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """A weight's gradient, zeros where it has none; ZeRO may keep the sum of microbatches apart, in another dtype."""
    apart = getattr(optimizer, "use_grad_accum_attribute", False)
    name = "grad_accum" if apart else "grad"
    if getattr(weight, name, None) is None:
        dtype = optimizer.gradient_accumulation_dtype if apart else weight.dtype
        setattr(weight, name, torch.zeros_like(weight, dtype=dtype))
    found: torch.Tensor = getattr(weight, name)
    return found


def _find_in_full_precision(tied: Sequence[torch.Tensor], optimizer: Any) -> None:
    """Where this optimizer adds up gradients of weights that no backward may have reached yet."""
    wanted = {id(weight) for weight in tied}
    for group, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
        for weight, gradient in zip(group, gradients, strict=True):
            if id(weight) in wanted:
                weight._hp_grad = gradient


def mark_replicated(module: torch.nn.Module, optimizer: Any) -> None:
    """Let gradients of tied weights count once in the norm: this optimizer looks for the mark on the gradient."""
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        for parameter in module.parameters():
            if parameter.grad is not None and getattr(parameter, "ds_pipe_replicated", False):
                parameter.grad.ds_pipe_replicated = True  # type: ignore[attr-defined]


def norm_of_nothing_is_zero(optimizer: Any) -> None:
    """A rank without a gradient that counts (none at all, or copies only) has nothing to add to the others' norm."""
    if not isinstance(optimizer, BF16_Optimizer):
        return
    counted, device = optimizer.get_grads_for_norm, optimizer.fp32_groups_flat_partition[0].device

    def counted_or_zero(for_clipping: bool = False) -> Any:
        found = counted(for_clipping)
        if for_clipping or found[0]:
            return found
        return [torch.zeros((), device=device)], found[1]

    optimizer.get_grads_for_norm = counted_or_zero


def bucket_holds_no_more_than_there_is(optimizer: Any) -> None:
    """ZeRO's bucket takes ``reduce_bucket_size`` whatever there is to put into it: 1 GB by default, twice in a step.

    A bucket that holds all gradients of a rank is filled as a larger one is, so sums are the same.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        there = sum(p.numel() for group in optimizer.bit16_groups for p in group)
        optimizer.reduce_bucket_size = min(optimizer.reduce_bucket_size, max(1, there))


def clip_over_pipeline(parameters: Iterable[torch.nn.Parameter], max_norm: float, group: Any) -> torch.Tensor:
    """Scale gradients so that the norm over all ranks of the pipeline is at most ``max_norm``.

    Upstream's fp32 path counts pipeline rank 0 only. A weight tied between ranks counts once: upstream marks its
    copies ``ds_pipe_replicated``. Called after the data-parallel reduction, so all pipelines get the same result.
    Returns the norm before clipping, a scalar tensor.
    """
    held = list(parameters)
    gradients = [p.grad for p in held if p.grad is not None]
    device = next((p.device for p in held), torch.device("cpu"))  # also where all of them are frozen now
    square = torch.zeros((), dtype=torch.float32, device=device)
    for gradient in (p.grad for p in held if p.grad is not None and not getattr(p, "ds_pipe_replicated", False)):
        square += gradient.detach().float().square().sum()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
