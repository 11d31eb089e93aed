"""What the ranks of a module do together besides training: saving averages, models and adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.collectives import agree, everywhere, told_by_all
from deepspeed_pulse.engine.device import HOST_BACKENDS
from deepspeed_pulse.errors import ConfigError


class Ranks:
    """The ranks that hold the layers of a ``PipelineModule``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def _watched(self, what: str) -> AbstractContextManager[None]:
        watchdog = self._module.watchdog
        return nullcontext() if watchdog is None else watchdog.watching_patiently(what)

    def got_on(self) -> None:
        """A file is written or read: the next may take as long as a rank has patience."""
        if self._module.watchdog is not None:
            self._module.watchdog.got_on()

    def gather_to_first(self, item: Any) -> list[Any] | None:
        """``item`` of every rank of the pipeline, in order, on its first rank; None on the others."""
        grid = self._module._grid
        first = self._module.global_rank == grid.pp_group[0]
        found: list[Any] | None = [None] * len(grid.pp_group) if first else None
        torch.distributed.gather_object(item, found, dst=grid.pp_group[0], group=grid.get_pipe_parallel_group())
        return found

    def decide_on_first(self, make: Callable[[], Any], what: str) -> Any:
        """What ``make`` gives on global rank 0, on every rank of the world; its error likewise."""
        with self._watched(what):
            return agree(make, what)

    def together(self, act: Callable[[], Any], what: str) -> Any:
        """What ``act`` gives on this rank; what any rank of the world meets in it is raised by all."""
        self._module.check_usable(what)
        return everywhere(act, what)

    def check_alike(self, given: str, what: str) -> None:
        """Raise a :class:`ConfigError` unless every rank of the world was ``given`` the same, in words."""
        found = told_by_all(given)
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise ConfigError(
                f"{what}: rank 0 was given {found[0]}, rank {other} {found[other]}; every rank calls it, with the same"
            )

    def bring_to_first(
        self, tensor: torch.Tensor | None, *, owner: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A tensor of pipeline rank ``owner``, on the CPU of global rank 0; None on the others.

        It travels as bytes: backends differ in the dtypes they know. ``tensor`` is that of the owner in the first
        pipeline, ignored on other ranks; ``shape`` and ``dtype`` are known to all.
        """
        grid = self._module._grid
        me, source, target = dist.get_rank(), grid.pp_group[owner], grid.pp_group[0]
        if grid.data_parallel_id != 0 or me not in (source, target):
            return None
        if source == target:
            assert tensor is not None
            return tensor.detach().cpu().contiguous()
        group, num_bytes = grid.get_pipe_parallel_group(), math.prod(shape) * dtype.itemsize
        on_host = torch.distributed.get_backend(group) in HOST_BACKENDS
        device = "cpu" if on_host else get_accelerator().device_name(self._module.local_rank)
        with self._watched("bringing weights to rank 0"):
            if me == source:
                assert tensor is not None
                if num_bytes:
                    sent = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
                    dist.send(sent, target, group=group)
                return None
            found = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            if num_bytes:
                dist.recv(found, source, group=group)
            return found.cpu().view(dtype).reshape(tuple(shape))
