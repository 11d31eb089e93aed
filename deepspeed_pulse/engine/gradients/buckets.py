"""Gradients that are summed over replicas together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BUCKET_BYTES = 2**22
"""Gradients of this size are summed in place; smaller ones are gathered up to it, so that latency does not count, and
are views of what was gathered from then on."""


def buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Large parameters alone, smaller ones together; by sizes only, so that all replicas do the same."""
    gathered: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if num_bytes >= BUCKET_BYTES:
            yield [parameter]
            continue
        gathered.append(parameter)
        size += num_bytes
        if size >= BUCKET_BYTES:
            yield gathered
            gathered, size = [], 0
    if gathered:
        yield gathered


@dataclass(frozen=True)
class Kept:
    """A bucket whose parts are the gradients from one step to the next, so that they are gathered only once."""

    parameters: Sequence[torch.nn.Parameter]
    sent: torch.Tensor
    parts: Sequence[torch.Tensor]

    def give(self) -> None:
        """Backwards add to it, where gradients have been cleared and all parameters still train."""
        if any(p.grad is not None or not p.requires_grad for p in self.parameters):
            return
        self.sent.zero_()
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            parameter.grad = part

    def holds(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether it is their gradients now."""
        return len(parameters) == len(self.parts) and all(
            p.grad is part for p, part in zip(parameters, self.parts, strict=True)
        )

    def is_held_elsewhere(self) -> bool:
        """Whether the program keeps a gradient of an earlier step, or a view of one: it may not change then.

        Also where torch, which promises nothing about it, no longer tells.
        """
        count = getattr(torch._C, "_storage_Use_Count", None)
        storage = self.sent.untyped_storage()
        return count is None or count(storage._cdata) > len(self.parts) + 2  # ``sent`` and ``storage``


@dataclass(frozen=True)
class Bucket:
    """Gradients on their way: what is summed, the gradients that get their part of it then, and the handle."""

    name: str
    sent: torch.Tensor
    copies: Sequence[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]
    work: Any
