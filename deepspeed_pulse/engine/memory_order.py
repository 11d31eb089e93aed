"""In which order weights lie in memory: mostly row by row, in channels_last or transposed otherwise.

Collectives, views as bytes and DeepSpeed's kernels know rows only. All ranks bring weights in one order
(:mod:`.starting.sameness`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_pulse.runtime.payload import is_dense


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its strides; None where it lies row by row."""
    is_plain = tensor.layout is not torch.strided or tensor.is_contiguous()
    return None if is_plain else tuple(tensor.stride())


@contextmanager
def flattened(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """For a while, weights that torch has no view as bytes of, or that lie otherwise than row by row, are flat.

    What fills its memory is a view in the order of that. Of what leaves gaps it is a copy, whose new numbers are taken.
    """
    kept = [(weight, weight.data) for weight in dict.fromkeys(weights) if not _has_rows(weight)]
    for weight, data in kept:
        weight.data = data.as_strided((data.numel(),), (1,)) if is_dense(data) else data.contiguous().view(-1)
    try:
        yield
    finally:
        for weight, data in kept:
            flat, weight.data = weight.data, data
            if not is_dense(data) and not torch.equal(flat, data.reshape(-1)):
                data.copy_(flat.view(data.shape))


def _has_rows(weight: torch.Tensor) -> bool:
    if weight.layout is not torch.strided:
        return True
    return weight.dim() > 0 and weight.stride(-1) == 1 and weight.is_contiguous()


def lay_in_rows(optimizer: Any) -> int:
    """Let the weights of an optimizer of DeepSpeed's lie row by row, before it has state; how many did not.

    Its kernels go through memory in order: on a CPU they would step a copy of any other weight.
    """
    if not any(kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__):
        return 0
    found = [p for group in optimizer.param_groups for p in group["params"] if order_of(p) is not None]
    for weight in found:
        weight.data = weight.data.contiguous()
    return len(found)


def lay_as_weights(optimizer: Any) -> None:
    """Let an optimizer's state lie as what it steps, which a file of another run need not have.

    Fused kernels go through both in the order of memory.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                state[key] = torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)
