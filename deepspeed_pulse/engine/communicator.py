"""DeepSpeed's messages as the runtime's protocol."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.config import START_SECONDS
from deepspeed_pulse.engine.device import HOST_BACKENDS, check_queues, wait
from deepspeed_pulse.engine.groups import GroupOptions, configured_groups
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.engine.waist.older import irecv, isend
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.program import Channel

CONNECT_SECONDS = 300.0
"""How long two ranks may take to connect."""

PLAIN = GroupOptions(timeout_seconds=CONNECT_SECONDS)


def check_backend(backend: str, device: torch.device) -> None:
    """Raise a ConfigError where a process group's backend cannot send what lies on the device."""
    if backend in HOST_BACKENDS and device.type != "cpu":
        raise ConfigError(
            f"the process group's backend {backend!r} sends from the host's memory, and the model is on "
            f"{device.type!r}: every message would hold up the device; start the process group with "
            f"{get_accelerator().communication_backend_name()!r} (deepspeed.init_distributed() without a backend)"
        )


class _Message:
    """A message under way; ``work`` is None where there is nothing to carry."""

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self, timeout_seconds: float) -> None:
        work, self._work = self._work, None  # waiting twice on one gloo work blocks for ever
        if work is not None:
            wait(work, self._buffer, timeout_seconds)


class PipelineCommunicator:
    """Point-to-point messages inside one pipeline.

    A backend that keeps tags (gloo) carries all channels in the pipeline's group, one tag each. NCCL
    and HCCL ignore tags and order messages per communicator, so there every channel has a group of
    its own: a rank that sends down while its peer sends up cannot block it. They also know few dtypes, no two the same,
    so there a message is bytes. A tensor without numbers is not sent: both ends know its shape.

    Args:
        seat: of this rank.
        options: of the process groups that it makes.
        got_on: called whenever groups were made or a channel has connected, of which there may be many.

    Raises:
        ConfigError: the backend cannot send what lies on the device, or the device has one queue.
    """

    def __init__(self, seat: Seat, options: GroupOptions = PLAIN, got_on: Callable[[], None] = lambda: None) -> None:
        self._seat, self._global_ranks, self._group, self._options = seat, seat.ranks, seat.group, options
        self._got_on = got_on
        backend = torch.distributed.get_backend(seat.group)
        self._tagged = backend in HOST_BACKENDS
        check_backend(backend, seat.device)
        if len(seat.ranks) > 1:
            check_queues(seat.device)
        self._patience = max(options.timeout_seconds, START_SECONDS)
        self._groups: dict[Channel, Any] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        """Make what the channels need; called by every rank of the world, as each makes the groups of all pipelines.

        Args:
            channels: all channels of the plan, in one order everywhere.
        """
        if self._tagged:
            return
        new = [channel for channel in dict.fromkeys(channels) if channel not in self._groups]
        with configured_groups(self._options, for_messages=True):
            for channel in new:
                self._make_group(channel)
                self._got_on()
        for channel in new:  # apart: making waits for nobody, connecting for the peer
            self._connect(channel)
            self._got_on()

    def _make_group(self, channel: Channel) -> None:
        for index, ranks in enumerate(self._seat.pipelines):
            group = dist.new_group(sorted((ranks[channel.source_rank], ranks[channel.target_rank])))
            if index == self._seat.index:
                self._groups[channel] = group

    def share(self, channels: Sequence[Channel]) -> None:
        """Carry channels in the pipeline's own group: for messages of which one at a time is on its way."""
        self._groups.update(dict.fromkeys(channels, self._group))

    def _connect(self, channel: Channel) -> None:
        """Carry one number: such backends connect at the first message, waiting for the peer.

        Done in one order on all ranks; in the first step two ranks could wait for each other.
        """
        me = dist.get_rank()
        if me in (self._global_ranks[channel.source_rank], self._global_ranks[channel.target_rank]):
            number = torch.zeros(1, device=self._seat.device)
            start = self.isend if me == self._global_ranks[channel.source_rank] else self.irecv
            start(number, channel).wait(CONNECT_SECONDS)

    def isend(self, tensor: torch.Tensor, channel: Channel) -> _Message:
        """Start to send a contiguous tensor."""
        return self._started(isend, tensor, self._global_ranks[channel.target_rank], channel)

    def irecv(self, tensor: torch.Tensor, channel: Channel) -> _Message:
        """Start to receive into a contiguous tensor."""
        return self._started(irecv, tensor, self._global_ranks[channel.source_rank], channel)

    def send_object(self, item: Any, channel: Channel) -> None:
        """Send anything that can be pickled, between two steps; returns when the peer has it, or the device will.

        By torch's functions: upstream's communication logger counts the messages of steps.
        """
        peer = self._global_ranks[channel.target_rank]
        content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        for tensor in (torch.tensor([content.numel()]), content):
            self._started(torch.distributed.isend, tensor.to(self._seat.device), peer, channel).wait(self._patience)

    def receive_object(self, channel: Channel) -> Any:
        """What the peer sends by :meth:`send_object`."""
        peer, device = self._global_ranks[channel.source_rank], self._seat.device
        size = torch.empty(1, dtype=torch.int64, device=device)
        self._started(torch.distributed.irecv, size, peer, channel).wait(self._patience)
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
        self._started(torch.distributed.irecv, content, peer, channel).wait(self._patience)
        return pickle.loads(content.cpu().numpy().tobytes())

    def _started(self, start: Callable[..., Any], tensor: torch.Tensor, peer: int, channel: Channel) -> _Message:
        if not tensor.numel():
            return _Message(None, tensor)
        group = self._group if self._tagged else self._groups[channel]
        sent = tensor if self._tagged else tensor.view(-1).view(torch.uint8)
        return _Message(start(sent, peer, group=group, tag=_tag(channel)), tensor)


def _tag(channel: Channel) -> int:
    return 2 if channel.frozen else 1
