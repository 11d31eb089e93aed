"""A polite request to stop (SIGTERM): all ranks agree at the start of the next step, save, and exit."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any
from weakref import WeakSet

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.groups import start_timeout

EXIT_STATUS = 128 + signal.SIGTERM
"""What a shell reports for a process that SIGTERM ended."""


_listening: WeakSet[Preemption] = WeakSet()
"""Of all engines of this process; an engine that is gone must neither be kept nor swallow a signal."""


def _hear(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not _listening:
        os.kill(os.getpid(), signal.SIGTERM)
    for one in _listening:
        one.heard = True


class Stopped(Exception):
    """A rank was asked to stop, and all ranks know: the step that was to begin does not."""


class Preemption:
    """Listens for SIGTERM on this rank; ranks tell one another at the start of every step whether they have heard it.

    A handler of the user's own stays in charge: then this listens to nothing, but still hears other
    ranks. A second SIGTERM ends the process at once, as does a failure: an unfinished save is absent.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.heard = False
        self.group: Any = None
        """All ranks', over the host's memory; None: the world's own is."""
        if get_accelerator().device_name() != "cpu":
            # over host memory, so that asking waits for no kernel
            self.group = torch.distributed.new_group(backend="gloo", timeout=start_timeout(timeout_seconds))
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _hear)
        if in_main_thread and signal.getsignal(signal.SIGTERM) is _hear:
            _listening.add(self)

    def end(self) -> None:
        """The engine stops no more."""
        _listening.discard(self)
