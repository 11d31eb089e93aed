"""What parameters need beyond activations, counted as plans count it: ``state = k * param_bytes``.

k covers weights, gradients, fp32 master weights and two Adam moments. A frozen parameter needs its weights
only, so it counts as 1/k of its bytes: a model with adapters is planned by what it really needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deepspeed_pulse.ir.profile import BUCKET_ELEMENTS, bucket_bytes, optimizer_factor, state_factor


def param_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the trainable parameters, and 1/k of those of frozen ones."""
    return sum(p.nbytes if p.requires_grad else -(-p.nbytes // _factor(p)) for p in parameters)


def state_bytes(
    parameters: Iterable[torch.Tensor], *, shards: int | None = None, bucket_elements: int = BUCKET_ELEMENTS
) -> int:
    """Weights, and for the trainable parameters gradients and optimizer state.

    ``shards``: under ZeRO-1, so many data-parallel ranks share the optimizer state; its bucket is counted, too, of
    which ``bucket_elements`` says the size.
    """

    def trained(p: torch.Tensor) -> int:
        return 2 * p.nbytes + -(-optimizer_factor(_dtype(p), zero=shards is not None) * p.nbytes // (shards or 1))

    found = list(parameters)
    bucket = 0
    for dtype in {_dtype(p) for p in found if shards is not None}:
        summed = sum(p.nbytes for p in found if p.requires_grad and _dtype(p) == dtype)
        bucket += bucket_bytes(dtype, summed, bucket_elements)
    return bucket + sum(trained(p) if p.requires_grad else p.nbytes for p in found)


def _factor(parameter: torch.Tensor) -> int:
    return state_factor(_dtype(parameter))


def _dtype(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
