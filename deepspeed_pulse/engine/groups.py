"""How long process groups wait for their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
from deepspeed.comm import comm as upstream_comm
from deepspeed.comm.torch import TorchBackend

START_SECONDS = 300.0
"""Before the first step, in saving and in loading, ranks that live wait at least so long for one another."""


def start_timeout(timeout_seconds: float) -> timedelta:
    """How long ranks that live wait for one another before the first step."""
    return timedelta(seconds=max(timeout_seconds, START_SECONDS))


@contextmanager
def groups_with_timeout(timeout_seconds: float) -> Iterator[None]:
    """Process groups that upstream makes inside have a timeout of their own, not torch's half an hour.

    A group over gloo waits in its making for its ranks; upstream passes no timeout on.
    """
    backend = upstream_comm.cdb
    if type(backend).new_group is not TorchBackend.new_group:
        yield
        return
    before = vars(backend).get("new_group")
    backend.new_group = partial(torch.distributed.new_group, timeout=start_timeout(timeout_seconds))
    try:
        yield
    finally:
        del backend.new_group
        if before is not None:
            backend.new_group = before
