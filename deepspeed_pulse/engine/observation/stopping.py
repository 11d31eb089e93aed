"""SIGTERM before there is an engine: noticed also while the main thread waits inside a collective."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class StopRequest:
    """Calls ``act`` from a thread when SIGTERM comes, from :meth:`listen` to :meth:`ignore`.

    A handler of Python's runs in the main thread only, and not before a call into a library returns; ranks that wait
    for one that is gone would never run it. A handler of the user's own stays in charge. Child processes get the
    default back.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._ends: tuple[int, int] | None = None
        os.register_at_fork(after_in_child=self.ignore)

    def listen(self) -> None:
        """Begin, in the main thread; elsewhere signals are not Python's to handle."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._ends is not None or not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._ends = reading, writing
        signal.signal(signal.SIGTERM, _noted)
        threading.Thread(target=self._wait, args=(reading,), name="pulse-stop-request", daemon=True).start()

    def ignore(self) -> None:
        """End: SIGTERM does again what it did before."""
        if self._ends is None:
            return
        (_, writing), self._ends = self._ends, None
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _noted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(writing)  # which ends the thread

    def _wait(self, reading: int) -> None:
        while number := os.read(reading, 1):
            if number[0] == signal.SIGTERM:
                self._act()
        os.close(reading)


def _noted(number: int, frame: object) -> None:
    """The thread has it."""
