"""Named values of one rank: one entry per name and microbatch, from first use to last.

An entry holds a leaf that all consumers on this rank read; autograd adds up their gradients in
``leaf.grad``. Gradients that come back from other ranks are added to it. The producer's backward
(or the message to the rank the value came from) takes the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_pulse.runtime.owning import cut_off
from deepspeed_pulse.runtime.payload import Payload, num_bytes, tensors_of


@dataclass
class _Place:
    """Where gradients add up of a value whose data nobody reads any more; ``like``: one element, in its form."""

    like: torch.Tensor
    requires_grad: bool
    grad: torch.Tensor | None = None


@dataclass
class _Entry:
    leaves: tuple[torch.Tensor | _Place, ...]
    is_tuple: bool
    bytes: int


class ValueBuffer:
    """Named values of one rank, by microbatch and name."""

    def __init__(self) -> None:
        self._entries: dict[int, dict[str, _Entry]] = {}

    def put(self, name: str, microbatch: int, value: Payload) -> None:
        """Keep a value; its consumers get a leaf that shares its memory, not its graph."""
        tensors = tensors_of(value)
        leaves = tuple(map(cut_off, tensors))
        entry = _Entry(leaves, not isinstance(value, torch.Tensor), num_bytes(tensors))
        self._entries.setdefault(microbatch, {})[name] = entry

    def get(self, name: str, microbatch: int) -> Any:
        """The value, until :meth:`release_data`."""
        entry = self._entries[microbatch][name]
        return entry.leaves if entry.is_tuple else entry.leaves[0]

    def gradients(self, name: str, microbatch: int) -> list[torch.Tensor | None]:
        """Sum of all consumers' gradients so far, one per tensor; None where no consumer had one."""
        return [leaf.grad for leaf in self._entries[microbatch][name].leaves]

    def add_gradients(self, name: str, microbatch: int, gradients: list[torch.Tensor | None]) -> None:
        """Add gradients that another rank's consumers sent back."""
        for leaf, gradient in zip(self._entries[microbatch][name].leaves, gradients, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)

    def whole_gradients(self, name: str, microbatch: int) -> list[torch.Tensor | None]:
        """The same for the rank that it came from: zeros where no consumer had one, None where none is wanted."""
        return [gradient_of(leaf) for leaf in self._entries[microbatch][name].leaves]

    def release_data(self, name: str, microbatch: int) -> int:
        """Keep no more than gradients of a value that nothing on this rank has read; its bytes."""
        entry = self._entries[microbatch][name]
        assert all(leaf.grad is None for leaf in entry.leaves), name
        entry.leaves = tuple(_without_data(leaf) for leaf in entry.leaves)
        return entry.bytes

    def drop(self, name: str, microbatch: int) -> None:
        for leaf in self._entries[microbatch].pop(name).leaves:
            leaf.grad = None  # the leaf is in the graph of a consumer, which may wait for its weights' gradients
        if not self._entries[microbatch]:
            del self._entries[microbatch]

    def has_data(self, name: str, microbatch: int) -> bool:
        return not any(isinstance(leaf, _Place) for leaf in self._entries[microbatch][name].leaves)

    def tensors(self, microbatch: int) -> list[torch.Tensor]:
        """What is held of a microbatch."""
        return [leaf for leaf in self._leaves(microbatch) if isinstance(leaf, torch.Tensor)]

    def gradient_bytes(self, microbatch: int) -> int:
        """Of the gradients of a microbatch's values, so far."""
        return num_bytes([leaf.grad for leaf in self._leaves(microbatch) if leaf.grad is not None])

    def _leaves(self, microbatch: int) -> Iterator[torch.Tensor | _Place]:
        for entry in self._entries.get(microbatch, {}).values():
            yield from entry.leaves

    def bytes_of(self, name: str, microbatch: int) -> int:
        return self._entries[microbatch][name].bytes

    @property
    def live(self) -> list[tuple[str, int]]:
        """What is held now; empty after a step."""
        return [(name, microbatch) for microbatch, entries in self._entries.items() for name in entries]


def _without_data(leaf: torch.Tensor | _Place) -> _Place:
    like = leaf.like if isinstance(leaf, _Place) else leaf.detach().new_empty(()).expand(leaf.shape)
    return _Place(like=like, requires_grad=leaf.requires_grad)


def gradient_of(leaf: torch.Tensor | _Place) -> torch.Tensor | None:
    """Zeros where it wants one and has none."""
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf.like if isinstance(leaf, _Place) else leaf) if leaf.grad is None else leaf.grad
