"""DeepSpeed's messages as the runtime's protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.device import HOST_BACKENDS, wait
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.engine.waist.older import irecv, isend
from deepspeed_pulse.ir.program import Channel
from deepspeed_pulse.ir.schedule import Direction

CONNECT_SECONDS = 300.0
"""How long two ranks may take to connect."""


class _Sent:
    """A handle; ``copy_to`` brings a staged message to the device it is for."""

    def __init__(self, work: Any, buffer: torch.Tensor, copy_to: torch.Tensor | None = None) -> None:
        self._work, self._buffer, self._copy_to = work, buffer, copy_to

    def wait(self, timeout_seconds: float) -> None:
        work, self._work = self._work, None  # waiting twice on one gloo work blocks for ever
        wait(work, self._buffer, timeout_seconds)
        if self._copy_to is not None:
            self._copy_to.copy_(self._buffer)


class PipelineCommunicator:
    """Point-to-point messages inside one pipeline.

    A backend that keeps tags (gloo) carries all channels in the pipeline's group, one tag each. NCCL
    and HCCL ignore tags and order messages per communicator, so there every channel has a group of
    its own: a rank that sends down while its peer sends up cannot block it.

    Args:
        seat: of this rank.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat, self._global_ranks, self._group = seat, seat.ranks, seat.group
        self._tagged = torch.distributed.get_backend(seat.group) in HOST_BACKENDS
        self._staged = self._tagged and seat.device.type != "cpu"
        self._groups: dict[Channel, Any] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        """Make what the channels need; called by every rank of the world, as each makes the groups of all pipelines.

        Args:
            channels: all channels of the plan, in one order everywhere.
        """
        if self._tagged:
            return
        for channel in channels:
            if channel in self._groups:
                continue
            for index, ranks in enumerate(self._seat.pipelines):
                pair = sorted((ranks[channel.source_rank], ranks[channel.target_rank]))
                group = dist.new_group(pair)
                if index == self._seat.index:
                    self._groups[channel] = group
                    self._connect(channel)

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

    def isend(self, tensor: torch.Tensor, channel: Channel) -> _Sent:
        buffer = tensor.cpu().pin_memory() if self._staged else tensor
        peer = self._global_ranks[channel.target_rank]
        return _Sent(isend(buffer, peer, group=self._of(channel), tag=_tag(channel)), buffer)

    def irecv(self, tensor: torch.Tensor, channel: Channel) -> _Sent:
        peer = self._global_ranks[channel.source_rank]
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if self._staged else tensor
        work = irecv(buffer, peer, group=self._of(channel), tag=_tag(channel))
        return _Sent(work, buffer, tensor if self._staged else None)

    def _of(self, channel: Channel) -> Any:
        return self._group if self._tagged else self._groups[channel]


def _tag(channel: Channel) -> int:
    return {Direction.FORWARD: 1, Direction.BACKWARD: 2, Direction.FROZEN: 3}[channel.direction]
