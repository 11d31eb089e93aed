"""What a message or a collective gives back."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_npu import counters
from torch_npu.hccl.dtypes import rules

POLL_SECONDS = 1e-3
"""Between two looks of NCCL's wait with a timeout."""


class Work(dist.Work):
    """Done when the device has passed ``end``; holds the tensors until somebody waits.

    ``wait`` makes the current stream wait. With a timeout, NCCL's polls on the host too; HCCL's ignores it.
    """

    def __init__(self, end: Any, tensors: list[torch.Tensor], name: str) -> None:
        super().__init__()
        self.end, self.tensors, self.name = end, tensors, name

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.npu.current_stream().wait_event(self.end)
        if rules() == "nccl" and timeout is not None and timeout.total_seconds() > 0:
            self._poll(timeout.total_seconds())
        self.tensors = []
        return True

    def _poll(self, seconds: float) -> None:
        counters.note("poll", 0, self.name)
        deadline = time.monotonic() + seconds
        while not self.end.query():
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"{self.name}: no end after {seconds} s")
            time.sleep(POLL_SECONDS)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.end.query()

    def is_success(self) -> bool:
        return self.end.query()

    def get_future(self) -> Any:
        future = torch.futures.Future()
        future.set_result(self.tensors)
        return future
