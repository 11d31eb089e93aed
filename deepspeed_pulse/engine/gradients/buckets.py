"""Gradients that are summed over replicas together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_pulse.ir.buckets import is_full
from deepspeed_pulse.runtime.payload import num_bytes


def buckets(parameters: Iterable[torch.nn.Parameter], bucket_bytes: int) -> Iterator[list[torch.nn.Parameter]]:
    """Large parameters alone, smaller ones together; by sizes only, so that all replicas do the same."""
    in_order = list(parameters)
    left = num_bytes(in_order)
    gathered: list[torch.nn.Parameter] = []
    size = 0
    for parameter in in_order:
        own = num_bytes([parameter])
        left -= own
        if own >= bucket_bytes:
            yield [parameter]
            continue
        gathered.append(parameter)
        size += own
        if is_full(size, left, bucket_bytes):
            yield gathered
            gathered, size = [], 0
    if gathered:
        yield gathered


class Expected:
    """What the last backward of a stage makes whole.

    Attributes:
        parameters: in the order in which gradients come.
        buckets: of them.
        number: of the bucket of a parameter, by its id.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> None:
        self.parameters, self.buckets = parameters, list(buckets(parameters, bucket_bytes))
        self.number = {id(p): number for number, bucket in enumerate(self.buckets) for p in bucket}


@dataclass
class Kept:
    """A bucket whose parts are the gradients from one step to the next, so that they are gathered only once.

    ``given``: the gradients. Each step's are tensors of their own, so that those that the program keeps can be counted.
    """

    parameters: Sequence[torch.nn.Parameter]
    sent: torch.Tensor
    parts: Sequence[torch.Tensor]
    given: Sequence[torch.Tensor | None]

    def take_back(self) -> bool:
        """Whether it can be given again. Where the program keeps a gradient of it, or a view of one, it may not change.

        Nor where torch, which promises nothing about it, no longer tells.
        """
        still = sum(p.grad is gradient for p, gradient in zip(self.parameters, self.given, strict=False))
        if still < len(self.parts):
            self.given = ()
        count = getattr(torch._C, "_storage_Use_Count", None)
        storage = self.sent.untyped_storage()
        return count is not None and count(storage._cdata) <= len(self.parts) + still + 2  # ``sent`` and ``storage``

    def give(self) -> None:
        """Backwards add to it, where gradients have been cleared, all parameters still train and none was changed."""
        if not all(parameter.requires_grad and parameter.grad is None for parameter in self.parameters):
            return
        self.sent.zero_()
        self.given = [part.detach() for part in self.parts]
        try:
            for parameter, gradient in zip(self.parameters, self.given, strict=True):
                parameter.grad = gradient
        except RuntimeError:  # torch's, where the parameter's numbers are of another form by now
            for parameter in self.parameters:
                parameter.grad = None
            self.given = ()

    def holds(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether it is their gradients now."""
        return len(parameters) == len(self.given) and all(
            p.grad is gradient for p, gradient in zip(parameters, self.given, strict=True)
        )


@dataclass(frozen=True)
class Bucket:
    """Gradients on their way: what is summed, the gradients that get their part of it then, and the handle."""

    name: str
    sent: torch.Tensor
    copies: Sequence[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]
    work: Any
