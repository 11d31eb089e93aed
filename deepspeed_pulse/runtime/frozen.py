"""Frozen parts on one rank: their layers, the results they hand on, and what of it this rank reads.

Work is driven from outside like a step's actions: everything that a plan puts before one action is one ``run``. Results
travel on channels of their own, so that they and the pipeline's messages never wait for each other's order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.channels import MIN_SLOTS
from deepspeed_pulse.ir.dependencies import Result, results_needed
from deepspeed_pulse.ir.fill import Fill, FrozenRun, FrozenWork, HandOver
from deepspeed_pulse.ir.graph import Layer
from deepspeed_pulse.ir.program import Channel, Message
from deepspeed_pulse.ir.schedule import Direction
from deepspeed_pulse.runtime.owning import copied
from deepspeed_pulse.runtime.payload import Signature, as_payload, map_tensors, num_bytes, tensors_in
from deepspeed_pulse.runtime.protocols import Communicator, Device
from deepspeed_pulse.runtime.shapes import ShapeBook
from deepspeed_pulse.runtime.stage import naming
from deepspeed_pulse.runtime.stopwatch import Stopwatch
from deepspeed_pulse.runtime.transport import Transport


@dataclass(frozen=True, kw_only=True)
class FrozenLayers:
    """A part's layers, ready to run. ``input``: the entry or part that its first layer reads.

    ``dtype``: what floating inputs are cast to; None leaves them.
    """

    name: str
    input: str
    layers: tuple[tuple[Layer, Callable[..., Any]], ...]
    dtype: torch.dtype | None = None

    def run(self, hidden: Any, first: int, end: int, lookup: Callable[[str], Any]) -> Any:
        """Layers ``first`` to ``end - 1``; ``hidden`` is what the one before gave, ignored by the first layer."""
        if first == 0:
            hidden = self._cast(lookup(self.input))
        for layer, function in self.layers[first:end]:
            popped = [self._cast(lookup(name)) for name in layer.pop]
            with naming(layer), torch.no_grad():
                hidden = map_tensors(function(hidden, *popped), _ordinary)
            if layer is not self.layers[-1][0]:  # whether or not a plan hands it over
                hidden = as_payload(hidden, f"layer {layer.name} of frozen part {self.name!r} returned")
        return hidden

    def _cast(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self._cast(item) for item in value)
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if floating and self.dtype is not None else value


class FrozenRuntime:
    """Runs one rank's part of a fill.

    Args:
        rank: pipeline rank.
        parts: all parts by name; layers only where this rank may run them.
        reads: names of parts whose results this rank's layers of the model read.
        communicator, device, timeout_seconds: as for a rank's pipeline.
    """

    def __init__(
        self,
        *,
        rank: int,
        parts: Mapping[str, FrozenLayers],
        reads: Sequence[str],
        communicator: Communicator,
        device: Device,
        timeout_seconds: float,
    ) -> None:
        self._rank, self._parts, self._reads = rank, parts, tuple(reads)
        self._transport = Transport(rank, communicator, device, timeout_seconds)
        self._book = ShapeBook()
        self._signatures: dict[tuple[str, str], Signature] = {}
        """What a part gave for the first microbatch of a mode."""
        self._held: dict[Result, Any] = {}
        self._uses: Counter[Result] = Counter()
        """How often each is yet to be read or handed over here; a hand-over counts until it is known to be over."""
        self._coming: dict[Result, Message] = {}
        self._buffers = 0
        """Bytes of receives that are posted, as counted last."""
        self._count: Callable[[int, int], None] = _uncounted
        self.stopwatch: Stopwatch[FrozenRun] = Stopwatch(rank, device)
        """Of what was begun last."""
        self.sent_bytes: dict[str, int] = {}

    def begin(
        self,
        fill: Fill,
        entry: Callable[[str, int], Any],
        *,
        microbatches: int,
        mode: str,
        known: Mapping[int | FrozenWork, Sequence[HandOver]] | None = None,
        count: Callable[[int, int], None] | None = None,
    ) -> None:
        """Get ready to encode the batch of ``entry(name, microbatch)``; batches of one ``mode`` have one shape.

        ``known``: hand-overs of this rank that are over (:func:`~deepspeed_pulse.ir.channels.known_hand_overs`); what
        is not there is kept to the end. ``count``: told of bytes that results and buffers for them add, and of those
        that are there in that moment alone.
        """
        self._fill, self._entry, self._mode, self._count = fill, entry, mode, count or _uncounted
        self._row, self._known = deque(fill.rows[self._rank]), known or {}
        self._uses = Counter(result for filling in self._row for result in self._needed(filling.work))
        self.stopwatch.begin()
        channels = channels_of(fill)
        mine = {c: messages for c, messages in channels.items() if self._rank in (c.source_rank, c.target_rank)}
        coming = (message for c, messages in mine.items() if c.target_rank == self._rank for message in messages)
        self._coming = {_result_of(message): message for message in coming}
        shapes = self._book.of(mode, [0] * microbatches)
        self._buffers = 0
        self._transport.begin(mine, dict.fromkeys(mine, MIN_SLOTS), shapes)

    def run(self, position: int) -> None:
        """All frozen work that comes before the action at this position."""
        self._release(self._known.get(position, ()))
        while self._row and self._row[0].position <= position:
            work = self._row.popleft().work
            if isinstance(work, HandOver):
                self._hand_over(work)
            else:
                self._run_layers(work)
            self._release(self._known.get(work, ()))

    def finish(self) -> dict[tuple[str, int], Any]:
        """End the encoding: by part and microbatch, the results that this rank reads."""
        assert not self._row, self._row[0]
        for key in list(self._coming):
            self._receive(key)
        self._transport.drain()
        self.sent_bytes = dict(self._transport.sent_bytes)
        found = {}
        for result in list(self._held):
            if self._stays(result):
                found[result.part, result.microbatch] = self._held.pop(result)
            else:
                self._drop(result)
        return found

    def count_posted(self) -> None:
        """Count buffers for results that come, where nothing has been counted since they were posted."""
        self._count_now(0)

    def _run_layers(self, run: FrozenRun) -> None:
        part, needed = self._parts[run.part], self._needed(run)
        for each in needed:
            self._receive(each)
        before = self._held[needed[0]] if run.first else None
        layers = self._fill.part(run.part).layers[run.first : run.end]
        self._count_now(0, max(layer.activation_bytes for layer in layers))
        with self.stopwatch.running(run):
            # copies: an encoder may change its input in place, and others read the same
            result = part.run(before, run.first, run.end, lambda name: copied(self._read(name, run.microbatch)))
        if run.end == len(part.layers):
            result = as_payload(result, f"the result of frozen part {run.part!r}")
            self._check_shape(run.part, result)
        for each in needed:
            self._used(each)
        self._keep(Result(run.part, run.end, run.microbatch, self._rank), result)

    def _needed(self, work: FrozenWork) -> tuple[Result, ...]:
        return results_needed(self._rank, work, self._fill)

    def _read(self, name: str, microbatch: int) -> Any:
        if name in self._parts:
            return self._held[Result(name, len(self._fill.part(name).layers), microbatch, self._rank)]
        return self._entry(name, microbatch)

    def _check_shape(self, part: str, result: Any) -> None:
        found = Signature.of(result)
        first = self._signatures.setdefault((self._mode, part), found)
        if found != first:
            raise BatchError(
                f"frozen part {part!r}: expected {first} as for the first microbatch, found {found}; what an "
                "encoder gives must have one shape: resize or crop images to one size, pad token ids to one length"
            )

    def _hand_over(self, work: HandOver) -> None:
        (result,) = self._needed(work)
        self._receive(result)  # it may have come from another rank
        what = f"the result of {work.done} layers of frozen part {work.part!r}"
        self._transport.send(_message(self._rank, work), as_payload(self._held[result], what))

    def _release(self, works: Sequence[HandOver]) -> None:
        """Hand-overs are over: what nothing else needs here is dropped."""
        self._transport.release([_message(self._rank, work) for work in works])
        for work in works:
            (result,) = self._needed(work)
            self._used(result)

    def _receive(self, result: Result) -> None:
        """Wait for a result that comes from another rank and is not here yet."""
        if result in self._coming:
            with self.stopwatch.waiting():
                found = self._transport.receive(self._coming.pop(result))
            self._keep(result, found)

    def _used(self, result: Result) -> None:
        """One more of its uses is over."""
        self._uses[result] -= 1
        if not self._uses[result] and not self._stays(result):
            self._drop(result)

    def _stays(self, result: Result) -> bool:
        """The next step reads it here."""
        return result.part in self._reads and result.done == len(self._fill.part(result.part).layers)

    def _keep(self, result: Result, content: Any) -> None:
        self._held[result] = content
        self._count_now(num_bytes(tensors_in(content)))

    def _drop(self, result: Result) -> None:
        self._count_now(-num_bytes(tensors_in(self._held.pop(result))))

    def _count_now(self, change: int, workspace: int = 0) -> None:
        """Count results that come or go, with the buffers for those that are to come."""
        posted, self._buffers = self._buffers, self._transport.buffer_bytes
        self._count(change + self._buffers - posted, workspace)


def _uncounted(*_: int) -> None:
    """Before a step, whose figures are none of it."""


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """What layers that train may keep for backward: an encoder may run in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def channels_of(fill: Fill) -> dict[Channel, list[Message]]:
    """Every channel that a fill needs, with its messages in the sender's order."""
    found: dict[Channel, list[Message]] = {}
    for rank, row in enumerate(fill.rows):
        for filling in row:
            if isinstance(filling.work, HandOver):
                channel = Channel(rank, filling.work.target_rank, frozen=True)
                found.setdefault(channel, []).append(_message(rank, filling.work))
    return found


def _message(rank: int, work: HandOver) -> Message:
    """Named by part and layers done; its ends are ranks, not stages."""
    name = f"{work.part}[{work.done}]"
    return Message(name, Direction.FORWARD, rank, work.target_rank, work.microbatch)


def _result_of(message: Message) -> Result:
    part, _, done = message.name.removesuffix("]").rpartition("[")
    return Result(part, int(done), message.microbatch, message.target_stage)
