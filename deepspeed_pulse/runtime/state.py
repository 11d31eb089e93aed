"""What parameters need beyond activations, counted as plans count it: ``state = k * param_bytes + frozen_bytes``.

k covers weights, gradients, fp32 master weights and two Adam moments. A frozen parameter needs its weights only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from deepspeed_pulse.ir.profile import bucket_bytes, optimizer_factor


def param_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the trainable parameters."""
    return sum(p.nbytes for p in parameters if p.requires_grad)


def frozen_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the other ones."""
    return sum(p.nbytes for p in parameters if not p.requires_grad)


def state_bytes(parameters: Iterable[torch.Tensor], *, shards: int = 1, bucket_elements: int | None = None) -> int:
    """Weights, and for the trainable parameters gradients and optimizer state.

    Args:
        shards: so many data-parallel ranks share the optimizer state.
        bucket_elements: the size of ZeRO-1's bucket, which is counted, too; None without ZeRO.
    """
    found, zero = list(parameters), bucket_elements is not None

    def trained(p: torch.Tensor) -> int:
        return 2 * p.nbytes + -(-optimizer_factor(_dtype(p), zero=zero) * p.nbytes // shards)

    bucket = 0 if bucket_elements is None else full_bucket([p for p in found if p.requires_grad], bucket_elements)
    return bucket + sum(trained(p) if p.requires_grad else p.nbytes for p in found)


def step_bytes(
    parameters: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    copies: bool,
    shards: int = 1,
    bucket_elements: int | None = None,
) -> int:
    """What sums of gradients and a step hold at most beside the state; ``planner.cost`` says what it is made of.

    Args:
        parameters: of those groups; needed under ZeRO only.
        optimizer: steps fp32 master weights where there are such, where they are shared this rank's part of them.
        copies: gradients are in 16 bit, and are copied for it.
        shards, bucket_elements: as in :func:`state_bytes`.
    """
    groups: list[int] = [sum(p.nbytes for p in group["params"]) for group in optimizer.param_groups]
    if bucket_elements is None:
        rooted = (size for size, group in zip(groups, optimizer.param_groups, strict=True) if _roots(optimizer, group))
        return sum(groups) * copies + sum(rooted)
    held = list(parameters)
    gradients, bucket = sum(p.nbytes for p in held), full_bucket(held, bucket_elements)
    own = max(groups, default=0) * (3 if copies else 2) // 2  # one group after the other
    return max(bucket, own - bucket - (gradients - gradients // shards))


def full_bucket(trained: Sequence[torch.Tensor], elements: int) -> int:
    """Bytes of ZeRO's bucket for each dtype of the trained parameters."""
    sizes = Counter[str]()
    for parameter in trained:
        sizes[_dtype(parameter)] += parameter.nbytes
    return sum(min(size, bucket_bytes(dtype, elements)) for dtype, size in sizes.items())


def _roots(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the second moments' roots of a group are made at once: torch's Adam by lists of tensors."""
    adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    lists = group.get("foreach") is not False and not group.get("fused")
    return adam and lists and any(p.device.type != "cpu" for p in group["params"])


def _dtype(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
