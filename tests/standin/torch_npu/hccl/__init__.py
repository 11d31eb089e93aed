"""Backend "hccl": the rules of HCCL, or of NCCL where ``STANDIN_WAITS`` says so, over gloo."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_npu.hccl.group import Group, Options

LISTED = dist.batch_isend_irecv


def batch_isend_irecv(operations: list[Any]) -> list[Any]:
    """torch's starts one after the other, which two ranks that both send first would wait in for ever."""
    group = operations[0].group or dist.group.WORLD
    return [group.batch(operations)] if isinstance(group, Group) else LISTED(operations)


def new_group(given: Any, options: Any) -> Group:
    """As torch-npu's: options that are not its own are dropped, priorities too."""
    options = options if isinstance(options, Options) else Options()
    options.is_high_priority_stream, options._timeout = False, given.timeout
    return Group(given.store, given.group_rank, given.group_size, options)


def register() -> None:
    """Make the backend known; torch-npu replaces the batched messages too."""
    dist.Backend.register_backend("hccl", new_group, extended_api=True, devices=["npu"])
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch_isend_irecv
