"""Ends a rank that has been in one place for too long, saying where it and the other ranks are."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed_pulse.engine.observation.whereabouts import Place, Whereabouts
from deepspeed_pulse.errors import PeerError

OUTSIDE = "the training script, outside train_batch and eval_batch,"


def beat_seconds(timeout_seconds: float) -> float:
    """How often the watchdog looks, and tells the other ranks."""
    return min(1.0, timeout_seconds / 4)


class Watchdog:
    """A thread that knows what the rank is doing and since when.

    It acts where an exception cannot: inside a collective that never returns. The process ends with
    exit status 1 after the message, and the launcher ends the other ranks.

    Args:
        rank: global rank, for the message.
        timeout_seconds: longest time in one place.
        act: what to do when the time is up, for tests; ends the process by default.
        whereabouts: where the other ranks are; None where that is not known.
    """

    def __init__(
        self,
        rank: int,
        timeout_seconds: float,
        act: Callable[[str], None] | None = None,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self._rank, self._timeout = rank, timeout_seconds
        self._act = act or _end_process
        self._whereabouts = whereabouts
        self._place: Place = OUTSIDE, time.monotonic(), False
        """One value, so that threads never see half of a change."""
        self._thread: threading.Thread | None = None

    def enter(self, doing: str) -> None:
        """The rank starts something that must be over in time."""
        self._place = doing, time.monotonic(), True
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="pulse-watchdog", daemon=True)
            self._thread.start()
            if self._whereabouts is not None:
                self._whereabouts.start(lambda: self._place)

    def leave(self) -> None:
        """Nothing is under way."""
        self._place = OUTSIDE, time.monotonic(), False

    @contextmanager
    def watching(self, doing: str) -> Iterator[None]:
        """Watch while inside; :meth:`enter` says what comes next. Where a peer is missing, say where all ranks are."""
        self.enter(doing)
        try:
            yield
        except PeerError as problem:
            raise PeerError(f"{problem}{self._where_all_are()}") from problem.__cause__
        finally:
            self.leave()

    def _watch(self) -> None:
        while True:
            time.sleep(beat_seconds(self._timeout))
            doing, since, inside = self._place
            seconds = time.monotonic() - since if inside else 0.0
            # Waits inside the runtime raise by themselves; a little later the watchdog makes sure.
            if seconds > 1.2 * self._timeout + 1.0:
                self._act(
                    f"rank {self._rank} has been in {doing} for {seconds:.0f} s, longer than "
                    f'"timeout_seconds" = {self._timeout:g}: a peer is silent or dead; this rank ends'
                    f"{self._where_all_are()}"
                )
                return

    def _where_all_are(self) -> str:
        return "" if self._whereabouts is None else f"\n{self._whereabouts.text(self._place)}"


def _end_process(message: str) -> None:
    print(f"pulse: watchdog: {message}", file=sys.stderr, flush=True)
    os._exit(1)
