"""A polite request to stop (SIGTERM): all ranks agree at the start of the next step, save, and exit."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any
from weakref import WeakSet

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.groups import group_timeout
from deepspeed_pulse.errors import RunError

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


def _forget_in_child() -> None:
    """A process that the program forks takes no part in steps: SIGTERM ends it, as it would any other."""
    _listening.clear()
    if signal.getsignal(signal.SIGTERM) is _hear:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def without_worker(problem: Exception, *, heard: bool) -> RunError | None:
    """What a step says that failed because SIGTERM, which went to all processes, ended a worker of the data loader.

    ``heard``: this rank was asked to stop. What it shared with a worker that is gone then is a broken connection.
    """
    text = str(problem)
    ended = heard or "signal: Terminated" in text  # else it "exited unexpectedly"
    told = isinstance(problem, RuntimeError) and "DataLoader worker" in text and ended
    if not told and not (heard and isinstance(problem, (OSError, EOFError))):
        return None
    return RunError(
        "SIGTERM ended a worker of the data loader, so this step cannot end, and nothing is saved "
        f"({type(problem).__name__}: {text}); let workers ignore it, as they end with their rank: "
        "DataLoader(..., worker_init_fn=f) with a function f(worker) that calls "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        more="data-workers",
    )


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
            self.group = torch.distributed.new_group(backend="gloo", timeout=group_timeout(timeout_seconds, "gloo"))
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _hear)
        if in_main_thread and signal.getsignal(signal.SIGTERM) is _hear:
            _listening.add(self)

    def end(self) -> None:
        """The engine stops no more."""
        _listening.discard(self)
