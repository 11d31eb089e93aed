"""What parameters need beyond activations, counted as plans count it: ``state = k * param_bytes``.

k covers weights, gradients, fp32 master weights and two Adam moments. A frozen parameter needs its weights
only, so it counts as 1/k of its bytes: a model with adapters is planned by what it really needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deepspeed_pulse.ir.profile import optimizer_factor, state_factor


def param_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the trainable parameters, and 1/k of those of frozen ones."""
    return sum(p.nbytes if p.requires_grad else -(-p.nbytes // _factor(p)) for p in parameters)


def state_bytes(parameters: Iterable[torch.Tensor], *, shards: int | None = None) -> int:
    """Weights, and for the trainable parameters gradients and optimizer state.

    ``shards``: under ZeRO-1, so many data-parallel ranks share the optimizer state.
    """

    def trained(p: torch.Tensor) -> int:
        return 2 * p.nbytes + -(-optimizer_factor(_dtype(p), zero=shards is not None) * p.nbytes // (shards or 1))

    return sum(trained(p) if p.requires_grad else p.nbytes for p in parameters)


def _factor(parameter: torch.Tensor) -> int:
    return state_factor(_dtype(parameter))


def _dtype(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
