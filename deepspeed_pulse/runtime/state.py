"""What parameters need beyond activations, counted as plans count it: ``state = k * param_bytes``.

k covers weights, gradients, fp32 master weights and two Adam moments. A frozen parameter needs its weights
only, so it counts as 1/k of its bytes: a model with adapters is planned by what it really needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from deepspeed_pulse.ir.profile import state_factor


def param_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the trainable parameters, and 1/k of those of frozen ones."""
    return sum(_bytes(p) if p.requires_grad else -(-_bytes(p) // _factor(p)) for p in parameters)


def state_bytes(parameters: Iterable[torch.Tensor], *, shards: int = 1) -> int:
    """Weights, and for the trainable parameters gradients and optimizer state.

    ``shards``: so many data-parallel ranks share the optimizer state (ZeRO-1).
    """
    found = 0
    for parameter in parameters:
        num_bytes = _bytes(parameter)
        if parameter.requires_grad:
            found += 2 * num_bytes + -(-(_factor(parameter) - 2) * num_bytes // shards)
        else:
            found += num_bytes
    return found


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _factor(parameter: torch.Tensor) -> int:
    return state_factor(str(parameter.dtype).removeprefix("torch."))
