"""How process groups are made: how long they wait for their ranks, what their backend is told, which are shared."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from deepspeed.comm import comm as upstream_comm
from deepspeed.comm.torch import TorchBackend

from deepspeed_pulse.config import START_SECONDS, PulseConfig
from deepspeed_pulse.engine.device import HOST_BACKENDS
from deepspeed_pulse.engine.observation.watchdog import limit_seconds
from deepspeed_pulse.errors import ConfigError

BACKEND_OF = {"hccl_buffer_size": "hccl", "nccl_high_priority_stream": "nccl"}
"""Keys of the ``"pulse"`` block that are one backend's."""


LATER_SECONDS = 60.0
"""How much later than the watchdog groups end a process that it has not ended."""


STEP_SECONDS = 3600.0
"""For a step, at most. The host hands over a step's messages and sums long before the device comes to them, receives
when the step begins, and NCCL's time runs from then on."""


def group_timeout(timeout_seconds: float, backend: str) -> timedelta:
    """How long ranks of a process group wait for one another.

    Over the host's memory a wait that is too long raises, and the error says who is missing. NCCL and HCCL end the
    process without saying that, so there the watchdog's time comes first.
    """
    seconds = max(timeout_seconds, START_SECONDS)
    if backend not in HOST_BACKENDS:
        seconds = limit_seconds(seconds) + LATER_SECONDS
    return timedelta(seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What a ``"pulse"`` block says of process groups; its keys have the meanings."""

    timeout_seconds: float
    hccl_buffer_size: int | None = None
    nccl_high_priority_stream: bool = False

    @classmethod
    def of(cls, pulse: PulseConfig) -> GroupOptions:
        return cls(**{name: getattr(pulse, name) for name in cls.__dataclass_fields__})

    def arguments(self, backend: str, *, for_messages: bool) -> dict[str, Any]:
        """Of one call of ``torch.distributed.new_group``, which keeps the options and writes into them."""
        timeout = group_timeout(self.timeout_seconds, backend)
        if backend not in HOST_BACKENDS:
            timeout += timedelta(seconds=STEP_SECONDS)
        options = None
        if backend == "hccl" and self.hccl_buffer_size is not None:
            bindings = importlib.import_module("torch_npu")._C._distributed_c10d
            options = bindings.ProcessGroupHCCL.Options()
            options.hccl_config = {"hccl_buffer_size": self.hccl_buffer_size}
        elif backend == "nccl" and self.nccl_high_priority_stream and for_messages:
            options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timeout  # torch warns of another one, and takes its own
        return {"timeout": timeout} if options is None else {"timeout": timeout, "pg_options": options}


def check_options(pulse: PulseConfig) -> None:
    """Refuse options of a backend that the process group has not: they would do nothing."""
    backend = str(torch.distributed.get_backend())
    for name, meant in BACKEND_OF.items():
        if getattr(pulse, name) != PulseConfig.model_fields[name].default and backend != meant:
            raise ConfigError(
                f'the "pulse" block: key {name!r}: an option of {meant!r}, and the process group\'s backend is '
                f"{backend!r}, which has no such option; remove the key"
            )


@contextmanager
def _unbound() -> Iterator[None]:
    """A process group that is made inside connects by itself, when its ranks first talk.

    Upstream binds NCCL's world to the rank's device. torch then splits every group off the world's communicator when it
    is made, and all ranks of the world wait for that, those outside the group too: a thousand times in a job of 512.
    """
    world: Any = torch.distributed.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


@contextmanager
def configured_groups(options: GroupOptions, *, for_messages: bool = False) -> Iterator[None]:
    """Process groups that are made inside through DeepSpeed have these options, and a timeout of their own.

    A group over gloo waits in its making for its ranks; upstream passes no timeout on, and torch's is half an hour.

    Groups of equal ranks are one: upstream makes one of each pipeline twice and one of the world besides. Every rank
    comes to their collectives in the same order, that of the program, so they need no order of their own; what is
    ``for_messages`` does, and shares nothing.

    Making one is no matter of the ranks outside of it: it connects when its own ranks first talk, on every backend.
    """
    backend = upstream_comm.cdb
    if type(backend).new_group is not TorchBackend.new_group:
        yield
        return
    made: dict[tuple[int, ...], Any] = {}
    name = str(torch.distributed.get_backend())

    def new_group(ranks: Any) -> Any:
        key = tuple(sorted(ranks))
        if for_messages or key not in made:
            with _unbound():
                made[key] = torch.distributed.new_group(ranks, **options.arguments(name, for_messages=for_messages))
        return made[key]

    before = vars(backend).get("new_group")
    backend.new_group = new_group
    try:
        yield
    finally:
        del backend.new_group
        if before is not None:
            backend.new_group = before
