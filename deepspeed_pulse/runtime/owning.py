"""Tensors that a layer may change in place although autograd has them as leaves, or others read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from deepspeed_pulse.runtime.payload import Payload, map_tensors


class _Alias(torch.autograd.Function):
    """The same memory behind a node of the graph: autograd lets nobody change a leaf, or a view of one, in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


_alias = cast(Callable[[torch.Tensor], torch.Tensor], _Alias.apply)


def released(value: Any) -> Any:
    """Tensors that nobody else reads, free to be changed: no copy. Those given stay what they are to autograd."""
    return map_tensors(value, lambda t: _alias(t) if t.requires_grad else t.detach())


def cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same memory, for whoever reads it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def copied(value: Any) -> Any:
    """Copies to be changed; gradients pass through. What is no tensor stays."""
    return map_tensors(value, torch.clone)


def without_gradient(value: Payload) -> Payload:
    """The same numbers for readers elsewhere, who send no gradient back."""
    return map_tensors(value, torch.Tensor.detach)  # type: ignore[no-any-return]
