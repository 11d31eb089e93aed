"""Messages: receives posted ahead up to the channel's slots, handles waited for once, shapes agreed on once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.local_world import LocalDevice, Mailboxes

from deepspeed_pulse.errors import BatchError, PeerError, RunError
from deepspeed_pulse.ir.program import Channel, Message
from deepspeed_pulse.ir.schedule import Direction
from deepspeed_pulse.runtime.payload import METADATA_INTS, Signature
from deepspeed_pulse.runtime.shapes import ShapeBook
from deepspeed_pulse.runtime.transport import Transport
from deepspeed_pulse.runtime.values import ValueBuffer

DOWN = Channel(0, 1)
UP = Channel(1, 0)


def message(m: int, direction: Direction = Direction.FORWARD) -> Message:
    stages = (0, 1) if direction is Direction.FORWARD else (1, 0)
    return Message("", direction, *stages, m)


class Recorder(Mailboxes):
    """Counts receives under way and waits per handle."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: Counter[Channel] = Counter()
        self.most: Counter[Channel] = Counter()

    def irecv(self, tensor, channel):  # type: ignore[no-untyped-def]
        handle = super().irecv(tensor, channel)
        self.posted[channel] += 1
        self.most[channel] = max(self.most[channel], self.posted[channel])
        outer, wait, waited = self, handle.wait, []

        def once(timeout_seconds: float) -> None:
            assert not waited, "waited for twice"
            waited.append(True)
            outer.posted[channel] -= 1
            wait(timeout_seconds)

        handle.wait = once
        return handle


def pair(num: int, slots: int) -> tuple[Transport, Transport, Recorder]:
    mail, device = Recorder(), LocalDevice(1)
    ends = [Transport(rank, mail, device, 1.0) for rank in (0, 1)]
    channels = {
        DOWN: [message(m) for m in range(num)],
        UP: [message(m, Direction.BACKWARD) for m in range(num)],
    }
    for end in ends:
        end.begin(channels, {DOWN: slots, UP: slots}, ShapeBook().of("train", [0] * num))
    return ends[0], ends[1], mail


def test_receives_run_ahead_by_the_slots_and_no_more() -> None:
    sender, receiver, mail = pair(6, slots=2)
    for m in range(6):
        sender.send(message(m), torch.full((3,), float(m)))
    for m in range(6):
        assert receiver.receive(message(m)).tolist() == [m] * 3
        assert mail.posted[DOWN] == min(2, 5 - m)
    assert mail.most[DOWN] == 2
    assert sender.sent_bytes == {"hidden": 6 * 12}


def test_a_receive_that_is_posted_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transport, "_post_ahead", lambda *_: None)
    with pytest.raises(AssertionError):
        test_receives_run_ahead_by_the_slots_and_no_more()


def test_gradients_travel_only_where_they_are_wanted() -> None:
    sender, receiver, _ = pair(1, slots=1)
    payload = (torch.ones(2, requires_grad=True), torch.arange(3), torch.ones(1))
    sender.send(message(0), payload)
    found = receiver.receive(message(0))
    assert [t.requires_grad for t in found] == [True, False, False]
    receiver.send_gradient(message(0, Direction.BACKWARD), [torch.full((2,), 7.0), None, None])
    assert receiver.sent_bytes == {"hidden_grad": 8}
    gradients = sender.receive(message(0, Direction.BACKWARD))
    assert gradients[0].tolist() == [7.0, 7.0] and gradients[1:] == [None, None]
    sender.drain()
    receiver.drain()


def test_nothing_is_sent_back_where_nothing_is_wanted() -> None:
    sender, receiver, _ = pair(2, slots=1)
    for m in range(2):
        sender.send(message(m), torch.ones(2))
        receiver.receive(message(m))
        receiver.send_gradient(message(m, Direction.BACKWARD), [None])
        assert sender.receive(message(m, Direction.BACKWARD)) is None
    assert not receiver.sent_bytes
    sender.drain()
    receiver.drain()


def test_one_channel_carries_both_kinds_in_the_order_in_which_they_are_sent() -> None:
    """A wave of two ranks: gradients of its way up go down between hidden states, and are read before these."""
    mail, device = Recorder(), LocalDevice(1)
    first, second = (Transport(rank, mail, device, 1.0) for rank in (0, 1))
    down = [Message("", Direction.FORWARD, 0, 1, m) for m in range(3)]
    up = [Message("", Direction.FORWARD, 2, 3, m) for m in range(3)]
    back = [Message("", Direction.BACKWARD, 3, 2, m) for m in range(3)]
    sent = [down[0], down[1], back[0], down[2], back[1], back[2]]
    for slots in (1, 2, 6):
        shapes = [book.of("train", [0] * 3) for book in (ShapeBook(), ShapeBook())]
        for end, known in zip((first, second), shapes, strict=True):
            end.begin({DOWN: sent, UP: up}, {DOWN: slots, UP: 3}, known)
        for m in range(3):
            first.send(down[m], torch.full((4,), float(m)))
            second.send(up[m], torch.ones(2, requires_grad=True))
            first.receive(up[m])
            if m:
                first.send_gradient(back[m - 1], [torch.full((2,), 10.0 + m)])
        first.send_gradient(back[2], [torch.full((2,), 13.0)])
        for arrived in (down[0], back[0], down[1], back[1], back[2], down[2]):
            found = second.receive(arrived)
            value = found[0] if arrived.direction is Direction.BACKWARD else found
            assert value.tolist() == (
                [11.0 + arrived.microbatch] * 2 if value.numel() == 2 else [arrived.microbatch] * 4
            )
        first.drain()
        second.drain()


def test_another_shape_is_an_error_that_shows_both() -> None:
    sender, _, _ = pair(2, slots=1)
    sender.send(message(0), torch.ones(2, 3))
    with pytest.raises(BatchError, match=r"expected \[2, 3\] float32, no gradient .* found \[1, 3\] float32"):
        sender.send(message(1), torch.ones(1, 3))


def test_shapes_are_agreed_on_once_a_key_and_forgotten_alike() -> None:
    mail, device = Recorder(), LocalDevice(1)
    ends = [Transport(rank, mail, device, 1.0) for rank in (0, 1)]
    books = [ShapeBook(max_keys=2) for _ in ends]
    metadata = []
    for keys in ([7, 8, 7], [8, 7, 8], [9, 9, 9], [8, 7, 7]):
        for end, book in zip(ends, books, strict=True):
            end.begin({DOWN: [message(m) for m in range(3)]}, {DOWN: 3}, book.of("train", keys))
        for m, key in enumerate(keys):
            ends[0].send(message(m), torch.full((key,), m))
            assert ends[1].receive(message(m)).tolist() == [m] * key
        metadata.append(ends[0].metadata_bytes // (8 * METADATA_INTS))
        for end in ends:
            end.drain()
    assert metadata == [2, 0, 1, 1], "8 was used last before 9, so 7 was forgotten"


def test_what_is_wrong_with_a_message_is_said_in_one_line() -> None:
    class Broken(Mailboxes):
        def irecv(self, tensor, channel):  # type: ignore[no-untyped-def]
            handle = super().irecv(tensor, channel)
            handle.wait = lambda timeout_seconds: _raise(RuntimeError("connection closed\nby the peer\nat line 7"))
            return handle

    end = Transport(1, Broken(), LocalDevice(1), 1.0)
    end.begin({DOWN: [message(0)]}, {DOWN: 1}, ShapeBook().of("train", [0]))
    with pytest.raises(PeerError, match=r"pipeline rank 0 did not send .*, or died: connection closed; see the other"):
        end.receive(message(0))


def _raise(problem: Exception) -> None:
    raise problem


def test_signature_round_trip() -> None:
    payload = (torch.ones(2, 3, requires_grad=True), torch.zeros(()), torch.ones(4, dtype=torch.bool))
    signature = Signature.of(payload)
    assert Signature.decode(signature.encode()) == signature
    assert Signature.decode(Signature.of(payload[0]).encode()).pack([payload[0]]) is payload[0]
    with pytest.raises(RunError, match="too many to describe"):
        Signature.of((torch.ones(1),) * 100).encode()


def test_values_add_up_the_gradients_of_all_consumers() -> None:
    buffer, source = ValueBuffer(), torch.ones(3, requires_grad=True) * 2
    buffer.put("skip", 0, source)
    for factor in (2.0, 3.0):
        (buffer.get("skip", 0) * factor).sum().backward()
    buffer.add_gradients("skip", 0, [torch.full((3,), 10.0)])
    assert buffer.gradients("skip", 0)[0].tolist() == [15.0] * 3
    assert source.grad_fn is not None and buffer.live == [("skip", 0)]
    buffer.drop("skip", 0)
    assert not buffer.live
