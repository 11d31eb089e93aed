"""What one rank holds: bytes that come and go in a step, and the most that were there at one time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_pulse.runtime.transport import Transport


@dataclass
class Stats:
    """What one rank counted in one step, in bytes."""

    p2p_bytes: dict[str, int] = field(default_factory=dict)
    metadata_bytes: int = 0
    local_value_bytes: int = 0
    peak_live_bytes: int = 0
    peak_parts: dict[str, int] = field(default_factory=dict)
    """What ``peak_live_bytes`` was made of, by :data:`~deepspeed_pulse.ir.run.MEMORY_PARTS`."""


class Holdings:
    """Counts, by :data:`~deepspeed_pulse.ir.run.MEMORY_PARTS`.

    Args:
        parameters: of the rank.
        state_bytes: weights, gradients and optimizer state; gradients that autograd makes anew in every step
            (``fresh_gradients``) from the end of their stage's first backward on, those that are there when the step
            begins always; else it makes them in every backward, beside sums that are always there.
        bucket_bytes: of these, ZeRO's bucket, which the first backward of a step makes.
        transport: knows what messages hold.
    """

    def __init__(
        self,
        parameters: tuple[torch.Tensor, ...],
        *,
        state_bytes: int,
        fresh_gradients: bool,
        bucket_bytes: int,
        transport: Transport,
    ) -> None:
        self._parameters, self._state_bytes, self._fresh_gradients = parameters, state_bytes, fresh_gradients
        self._bucket_bytes, self._no_bucket = bucket_bytes, 0
        self._transport = transport
        self._stats = Stats()
        self._no_gradient: dict[int, int] = {}
        """Bytes of parameters whose gradients this step has not made yet, by their ids: a tensor's own hash is slow."""
        self._waiting: dict[int, int] = {}
        """By microbatch, gradients that wait for the backward or the message that takes them."""
        self._extra = 0
        """What extra forwards keep."""
        self.live: dict[str, int] = {}

    def begin(self, stats: Stats, *, training: bool, communicators: int, goes_on: bool) -> None:
        """Start a step, whose figures go to ``stats``. ``goes_on``: what the step before has left is still there."""
        self._stats = stats
        fresh = training and self._fresh_gradients
        lacking = (p for p in self._parameters if fresh and p.requires_grad and p.grad is None)
        self._no_gradient = {id(p): p.nbytes for p in lacking}
        if not goes_on:
            self.live = {"activations": 0, "received": 0, "recomputed": 0, "gradients": 0, "frozen": 0, "step": 0}
            self._waiting, self._extra = {}, 0
        self._no_bucket = self._bucket_bytes if training else 0
        self.live["state"] = self._state_bytes - sum(self._no_gradient.values()) - self._no_bucket
        if communicators:
            self.live["communicators"] = communicators

    def count(self, part: str, change: int, workspace: int = 0) -> None:
        """Bytes that come or go; ``workspace`` is there in that moment."""
        self.live[part] += change
        buffers, leaving = self._transport.buffer_bytes, self._transport.leaving_bytes
        live = sum(self.live.values()) + buffers + leaving + workspace
        if live > self._stats.peak_live_bytes:
            self._stats.peak_live_bytes = live
            received = self.live["received"] + buffers
            self._stats.peak_parts = {**self.live, "received": received, "sent": leaving, "workspace": workspace}

    def hold(self, part: str, num_bytes: int) -> None:
        """Bytes that stay of an action's workspace when it has ended; the next count looks how much is there."""
        self.live[part] += num_bytes

    def drop(self, part: str, num_bytes: int) -> None:
        """Bytes that go, or that a message has taken over; the next count looks how much is there."""
        self.live[part] -= num_bytes

    def count_bucket(self) -> None:
        """A backward begins that adds to gradients."""
        if self._no_bucket:
            self.count("state", self._no_bucket)
            self._no_bucket = 0

    def lacks_gradients(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether a backward makes gradients of these where none are."""
        return not self._fresh_gradients or (
            bool(self._no_gradient) and any(id(p) in self._no_gradient for p in parameters)
        )

    def count_fresh(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients that a stage's first backward has made; while it ran, a layer's own were among its workspace."""
        if self._no_gradient:
            self.count("state", sum(self._no_gradient.pop(id(p), 0) for p in parameters))

    def count_waiting(self, m: int, held: int) -> None:
        """Gradients of a microbatch that wait."""
        self.count("gradients", held - self._waiting.get(m, 0))
        self._waiting[m] = held

    def count_extra(self, held: int) -> None:
        """What extra forwards keep for one another, and estimates."""
        self.count("received", held - self._extra)
        self._extra = held

    def count_extra_forward(self, held: int, workspace: int) -> None:
        """The same while one runs."""
        self.count("received", 0, workspace + held - self._extra)

    def count_step(self, held: int) -> None:
        """What a step of the optimizer makes and drops."""
        for change in (held, -held):
            self.count("step", change)
