"""A communicator: some ranks and one stream, in whose order all that it is given runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import counters, library
from torch_npu.hccl.dtypes import check_sent
from torch_npu.hccl.work import Work


class Communicator:
    """Made when it is first needed; the host then waits until all its ranks have come."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, made: counters.Made) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        counters.communicator(made)
        self.name = made.name
        self.stream = torch.npu.Stream()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self._carrier = library.Carrier(self._gloo, self.stream.device_index, self.stream.stream_id)

    def run(self, act: Callable[[Any], None], tensors: list[torch.Tensor], name: str) -> Work:
        """After what the current stream has been given: ``act`` on the carrier of messages."""
        for tensor in tensors:
            check_tensor(tensor)
            tensor.record_stream(self.stream)
        start = torch.npu.Event()
        start.record()
        self.stream.wait_event(start)
        act(self._carrier)
        end = torch.npu.Event()
        end.record(self.stream)
        return Work(end, tensors, f"{name} ({self.name})")


def check_tensor(tensor: torch.Tensor) -> None:
    if tensor.device.type != "npu":
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    check_sent(tensor)
