"""Backend "hccl": the rules of HCCL, or of NCCL where ``STANDIN_WAITS`` says so, over gloo."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_npu.hccl.group import Group

LISTED = dist.batch_isend_irecv


def batch_isend_irecv(operations: list[Any]) -> list[Any]:
    """torch's starts one after the other, which two ranks that both send first would wait in for ever."""
    group = operations[0].group or dist.group.WORLD
    return [group.batch(operations)] if isinstance(group, Group) else LISTED(operations)


def register() -> None:
    """Make the backend known; torch-npu replaces the batched messages too."""
    dist.Backend.register_backend("hccl", Group, devices=["npu"])
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch_isend_irecv
