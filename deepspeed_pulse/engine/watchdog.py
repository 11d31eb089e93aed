"""Ends a rank that has been in one place for too long, saying where."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchdog:
    """A thread that knows what the rank is doing and since when.

    It acts where an exception cannot: inside a collective that never returns. The process ends with
    exit status 1 after the message, and the launcher ends the other ranks.

    Args:
        rank: global rank, for the message.
        timeout_seconds: longest time in one place.
        act: what to do when the time is up, for tests; ends the process by default.
    """

    def __init__(self, rank: int, timeout_seconds: float, act: Callable[[str], None] | None = None) -> None:
        self._rank, self._timeout = rank, timeout_seconds
        self._act = act or _end_process
        self._under_way: tuple[str, float] | None = None
        """What, and since when: one value, so that the thread never sees half of a change."""
        self._thread: threading.Thread | None = None

    def enter(self, doing: str) -> None:
        """The rank starts something that must be over in time."""
        self._under_way = doing, time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="pulse-watchdog", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """Nothing is under way."""
        self._under_way = None

    @contextmanager
    def watching(self, doing: str) -> Iterator[None]:
        """Watch while inside; :meth:`enter` says what comes next."""
        self.enter(doing)
        try:
            yield
        finally:
            self.leave()

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            doing, since = self._under_way or ("nothing", time.monotonic())
            seconds = time.monotonic() - since
            # Waits inside the runtime raise by themselves; a little later the watchdog makes sure.
            if seconds > 1.2 * self._timeout + 1.0:
                self._act(
                    f"rank {self._rank} has been in {doing} for {seconds:.0f} s, longer than "
                    f'"timeout_seconds" = {self._timeout:g}: a peer is silent or dead; this rank ends'
                )
                return


def _end_process(message: str) -> None:
    print(f"deepspeed_pulse watchdog: {message}", file=sys.stderr, flush=True)
    os._exit(1)
