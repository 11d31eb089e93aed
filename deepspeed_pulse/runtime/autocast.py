"""Autocast as it was, for what runs later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """Whether it is on, and its dtype, by kind of device."""

    states: tuple[tuple[str, torch.dtype, bool], ...] = ()

    @classmethod
    def now(cls, kinds: Iterable[str]) -> Autocast:
        """Of the CPU and these kinds of devices."""
        every = sorted({"cpu", *kinds})
        return cls(tuple((k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in every))

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in self.states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield
