"""Messages of one rank: receives posted ahead, sends not waited for until the peer has them.

Every boundary (an edge between two stages for the hidden state or one named value) agrees on shapes,
dtypes and wanted gradients once for each shape of the batch: the first message is preceded by a
metadata message. Receives of what is known are posted ahead; what is not known is received when it
is needed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed_pulse.errors import BatchError, PeerError
from deepspeed_pulse.ir.program import Channel, Message
from deepspeed_pulse.ir.schedule import Direction
from deepspeed_pulse.runtime.payload import METADATA_INTS, Payload, Signature, TensorMeta, num_bytes, tensors_of
from deepspeed_pulse.runtime.protocols import Communicator, Device, Handle
from deepspeed_pulse.runtime.shapes import Shapes


@dataclass
class _Sent:
    """A message on its way; ``num_bytes``: of its buffers, where nothing else keeps them."""

    buffers: list[tuple[torch.Tensor, Handle]] = field(default_factory=list)
    num_bytes: int = 0


@dataclass
class _Inbox:
    """A channel's messages still to be posted, and those posted but not consumed."""

    waiting: deque[Message]
    slots: int
    posted: dict[Message, list[tuple[torch.Tensor, Handle]]]


class Transport:
    """Sends and receives the messages of one rank's program.

    Args:
        rank: pipeline rank.
        communicator: carries tensors.
        device: allocates receive buffers.
        timeout_seconds: silence of a peer after which a wait raises.
    """

    def __init__(self, rank: int, communicator: Communicator, device: Device, timeout_seconds: float) -> None:
        self._rank = rank
        self._communicator = communicator
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._shapes: Sequence[Shapes] = ()
        self._earlier: tuple[Collection[Message], Sequence[Shapes]] = ((), ())
        self._due: Sequence[Sequence[Message]] | None = None
        self._inboxes: dict[Channel, _Inbox] = {}
        self._channel_of: dict[Message, Channel] = {}
        self._in_flight: dict[Message, _Sent] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.metadata_bytes = 0
        self.buffer_bytes = 0
        """Of receives that are posted."""
        self.leaving_bytes = 0
        """Of sends that their peers may not have yet, where nothing else keeps them."""

    def begin(
        self,
        channels: Mapping[Channel, Sequence[Message]],
        slots: Mapping[Channel, int],
        shapes: Sequence[Shapes],
        due: Sequence[Sequence[Message]] | None = None,
        earlier: tuple[Collection[Message], Sequence[Shapes]] = ((), ()),
    ) -> None:
        """Start a step: reset counters and post the first receives.

        Args:
            channels: all channels that touch this rank, messages in the sender's order.
            slots: receive buffers per channel.
            shapes: per microbatch, what is known of batches of its shape.
            due: per step, what is to be received from then on, shapes known or not; None: as much as slots allow.
            earlier: messages of the data of the step before, and the shapes of that.
        """
        self._shapes, self._earlier = shapes, earlier
        self._channel_of = {m: c for c, messages in channels.items() for m in messages}
        self._inboxes = {
            c: _Inbox(deque(messages), slots[c], {}) for c, messages in channels.items() if c.target_rank == self._rank
        }
        self.sent_bytes.clear()
        self.metadata_bytes = 0
        self._due = due
        for channel, inbox in self._inboxes.items():
            self._post_ahead(channel, inbox)

    def reach(self, position: int) -> None:
        """This rank comes to the step at that position: post what is due there."""
        for message in () if self._due is None else self._due[position]:
            channel = self._channel_of[message]
            inbox = self._inboxes[channel]
            self._skip_unwanted(inbox)
            if inbox.waiting and inbox.waiting[0] == message:
                self._post_next(channel, inbox)

    def receive(self, message: Message) -> Payload | list[torch.Tensor | None] | None:
        """Wait for a message.

        Returns:
            Forward: the payload, with ``requires_grad`` set where a gradient is wanted. Backward: one
            gradient or None per tensor of the edge's payload; None when the edge wants no gradient.
        """
        channel = self._channel_of[message]
        inbox = self._inboxes[channel]
        if message.direction is Direction.BACKWARD and not self._agreed(message).wants_gradient:
            self._skip_unwanted(inbox)
            return None
        while message not in inbox.posted:
            self._post_next(channel, inbox)
        tensors = [self._arrived(tensor, handle, message) for tensor, handle in inbox.posted.pop(message)]
        self.buffer_bytes -= num_bytes(tensors)
        self._post_ahead(channel, inbox)
        signature = self._agreed(message)
        if message.direction is not Direction.BACKWARD:
            arrived = zip(signature.tensors, tensors, strict=True)
            return signature.pack([m.shaped(tensor).requires_grad_(m.requires_grad) for m, tensor in arrived])
        gradients = iter(tensors)
        return [meta.shaped(next(gradients)) if meta.requires_grad else None for meta in signature.tensors]

    def send(self, message: Message, payload: Payload, unkept_bytes: int = 0) -> None:
        """Start a forward message. The payload is kept until the peer has it.

        ``unkept_bytes``: what it holds that nothing else keeps.
        """
        channel, known = self._channel_of[message], self._known(message)
        signature = Signature.of(payload)
        if known is None:
            self._learn(message, signature)
            encoded = signature.encode()
            buffer = self._device.empty(encoded.shape, encoded.dtype).copy_(encoded)
            # Not waited for: the receiver may post this receive only after later actions of this rank.
            self._in_flight[message] = _Sent([(buffer, self._communicator.isend(buffer, channel))])
            self.metadata_bytes += num_bytes([buffer])
        elif known != signature:
            raise BatchError(
                f"{message.label} from stage {message.source_stage} to stage {message.target_stage}, microbatch "
                f"{message.microbatch}: expected {known} as for an earlier batch of the same shapes, found "
                f"{signature}; {known.advice_where(signature)}"
            )
        metas = (known or signature).tensors
        self._start(message, channel, list(zip(metas, tensors_of(payload), strict=True)), unkept_bytes)

    def send_gradient(self, message: Message, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start a backward message: one gradient per tensor of the edge's payload, None where not wanted."""
        metas = self._agreed(message).tensors
        wanted = [(meta, g) for g, meta in zip(gradients, metas, strict=True) if meta.requires_grad]
        assert all(g is not None for _, g in wanted), message
        if wanted:
            tensors = [(meta, g) for meta, g in wanted if g is not None]
            self._start(message, self._channel_of[message], tensors, num_bytes([g for _, g in tensors]))

    def release(self, messages: Sequence[Message]) -> None:
        """Drop the buffers of sends that the peer must have received by now; returns at once."""
        for message in messages:
            sent = self._in_flight.pop(message, _Sent())
            for _, handle in sent.buffers:
                self._wait(handle, message, self._channel_of[message].target_rank, "take")
            self.leaving_bytes -= sent.num_bytes

    def drain(self) -> None:
        """Wait for all sends; afterwards nothing is under way."""
        self.release(list(self._in_flight))
        left = [m for inbox in self._inboxes.values() for m in (*inbox.posted, *inbox.waiting) if self._counts(m)]
        assert not left, f"messages never consumed: {left}"

    def _shapes_of(self, message: Message) -> Shapes:
        messages, shapes = self._earlier
        return (shapes if message in messages else self._shapes)[message.microbatch]

    def _known(self, message: Message) -> Signature | None:
        return self._shapes_of(message).signatures.get(message.boundary)

    def _agreed(self, message: Message) -> Signature:
        return self._shapes_of(message).signatures[message.boundary]

    def _learn(self, message: Message, signature: Signature) -> None:
        self._shapes_of(message).signatures[message.boundary] = signature

    def _counts(self, message: Message) -> bool:
        return message.direction is not Direction.BACKWARD or self._agreed(message).wants_gradient

    def _start(
        self,
        message: Message,
        channel: Channel,
        tensors: Sequence[tuple[TensorMeta, torch.Tensor]],
        unkept_bytes: int,
    ) -> None:
        sent = self._in_flight.setdefault(message, _Sent())
        for meta, tensor in tensors:
            buffer = meta.flat(tensor.detach())
            sent.buffers.append((buffer, self._communicator.isend(buffer, channel)))
        sent.num_bytes = unkept_bytes
        self.leaving_bytes += unkept_bytes
        self.sent_bytes[message.label] += num_bytes([tensor for _, tensor in tensors])

    def _post_ahead(self, channel: Channel, inbox: _Inbox) -> None:
        while self._due is None and len(inbox.posted) < inbox.slots:
            self._skip_unwanted(inbox)
            if not inbox.waiting or self._known(inbox.waiting[0]) is None:
                return
            self._post_next(channel, inbox)

    def _skip_unwanted(self, inbox: _Inbox) -> None:
        """Drop gradients at the head of the queue that their edge does not want."""
        while inbox.waiting:
            head = inbox.waiting[0]
            signature = self._known(head)
            if head.direction is not Direction.BACKWARD or signature is None or signature.wants_gradient:
                return
            inbox.waiting.popleft()

    def _post_next(self, channel: Channel, inbox: _Inbox) -> None:
        self._skip_unwanted(inbox)
        message = inbox.waiting.popleft()
        signature = self._known(message)
        if signature is None:
            signature = self._receive_signature(channel, message)
            self._learn(message, signature)
        forward = message.direction is not Direction.BACKWARD
        metas = [meta for meta in signature.tensors if forward or meta.requires_grad]
        buffers = [self._device.empty(meta.buffer_shape, meta.dtype) for meta in metas]
        self.buffer_bytes += num_bytes(buffers)
        inbox.posted[message] = [(buffer, self._communicator.irecv(buffer, channel)) for buffer in buffers]

    def _receive_signature(self, channel: Channel, message: Message) -> Signature:
        buffer = self._device.empty((METADATA_INTS,), torch.int64)
        return Signature.decode(self._arrived(buffer, self._communicator.irecv(buffer, channel), message))

    def _arrived(self, tensor: torch.Tensor, handle: Handle, message: Message) -> torch.Tensor:
        self._wait(handle, message, self._channel_of[message].source_rank, "send")
        return tensor

    def _wait(self, handle: Handle, message: Message, peer: int, verb: str) -> None:
        try:
            handle.wait(self._timeout_seconds)
        except RuntimeError as problem:
            reason = str(problem).splitlines()[0]
            raise PeerError(
                f"pipeline rank {peer} did not {verb} {message.label} of microbatch {message.microbatch} (stage "
                f"{message.source_stage} to stage {message.target_stage}) within {self._timeout_seconds:g} s, or died: "
                f'{reason}; see the other ranks\' errors, or raise "timeout_seconds" in the "pulse" block'
            ) from problem
