"""Where backward begins: what autograd knows of a stage's outputs, without their data.

An output that was sent is of no use to its own stage, unless a layer has saved it: its memory is free for others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Root = GradientEdge
"""With a torch that needs it, the tensor."""


def roots_of(tensors: Sequence[torch.Tensor]) -> tuple[Root | None, ...]:
    """Of each tensor what :func:`torch.autograd.backward` needs; None for one without a gradient."""
    root: Callable[[torch.Tensor], Any] = get_gradient_edge if takes_edges() else lambda tensor: tensor
    return tuple(root(tensor) if tensor.requires_grad else None for tensor in tensors)


@functools.cache
def takes_edges() -> bool:
    """Whether this torch begins backward at an edge; an older one needs the tensor.

    Tried at the first step, not when this is imported: a process whose autograd has begun cannot be forked.
    """
    leaf = torch.zeros(1, requires_grad=True)
    try:
        torch.autograd.backward([get_gradient_edge(leaf * 2)], [torch.ones(1)])
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True
