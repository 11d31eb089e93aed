"""What the runtime is given: a communicator, a device, the data of a step, and sometimes timers.

The engine brings DeepSpeed's; tests bring mailboxes in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from deepspeed_pulse.ir.program import Channel, Step


class Handle(Protocol):
    """A send or receive under way. ``wait`` is called exactly once."""

    def wait(self, timeout_seconds: float) -> None:
        """Return when the buffer may be used again; raise when the peer is silent for too long."""


class Communicator(Protocol):
    """Asynchronous messages between pipeline ranks; one channel keeps its order."""

    def isend(self, tensor: torch.Tensor, channel: Channel) -> Handle: ...

    def irecv(self, tensor: torch.Tensor, channel: Channel) -> Handle: ...


class Device(Protocol):
    """Where tensors live and backward runs."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def mark(self) -> Any:
        """This moment among the work handed to the device."""

    def times_ms(self, marks: Sequence[Any]) -> list[float]:
        """When the device came to marks, ms on the host's clock, which ranks of one machine share. Waits for it."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Around a backward that adds to gradients of weights."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward needs it: divided by the number of microbatches, and loss-scaled."""


class Timers(Protocol):
    """Times the parts of a step, each a ``with``."""

    def receiving(self, step: Step) -> AbstractContextManager[None]: ...

    def computing(self, step: Step) -> AbstractContextManager[None]: ...

    def sending(self, step: Step) -> AbstractContextManager[None]: ...


class Batches(Protocol):
    """The data of one step, by microbatch."""

    def inputs(self, microbatch: int, backbone: int) -> Any:
        """The input of a backbone's first layer: a tensor or a tuple of tensors."""

    def entry(self, name: str, microbatch: int) -> Any:
        """A batch entry."""

    def has_entry(self, name: str) -> bool:
        """True when this rank reads the entry itself, False when it comes as a message."""

    def release(self, microbatch: int) -> None:
        """The microbatch's data is needed no more on this rank."""
