"""Where every rank is, kept in the store of the default process group, to say who is late when one is.

A thread of each rank writes a line about once a second while a step runs; nothing is written per action. Whoever gives
up reads the lines of all. A rank that is stopped writes no more: its line is old, and says where it was.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

ANSWER_SECONDS = 3.0
"""How long the store may take to answer; the rank that holds it may be the one that is stopped."""

SHOWN = 32
"""Lines of a message; the ranks that have been longest in one place come first."""

Place = tuple[str, float, bool]
"""What a rank is in, since when (``time.monotonic``), and whether that is inside a step."""


class Whereabouts:
    """Lines of all ranks.

    Args:
        store: shared by the ranks.
        rank, world_size: global.
        beat_seconds: time between two lines of a rank that is inside a step.
    """

    def __init__(self, store: Any, rank: int, world_size: int, beat_seconds: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._beat_seconds = beat_seconds

    def start(self, place: Callable[[], Place]) -> None:
        """Begin to write where this rank is."""
        # A connection of its own: the process group's own waits would hold it up.
        store = self._store.clone()
        threading.Thread(target=self._beat, args=(store, place), name="pulse-whereabouts", daemon=True).start()

    def text(self, place: Place) -> str:
        """All ranks, a line each, those that are longest in one place first; writes this rank's own line before."""
        found: list[str] = []

        def ask() -> None:
            store = self._store.clone()
            self._write(store, place)
            found.extend(self._lines(store))

        thread = threading.Thread(target=_quietly, args=(ask,), daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        lines = list(found) or [
            f"not known: the store of the process group did not answer within {ANSWER_SECONDS:g} s; the process that "
            "holds it (global rank 0, or the launcher) is stopped or dead"
        ]
        return "\n  ".join(["where the ranks are:", *lines])

    def _beat(self, store: Any, place: Callable[[], Place]) -> None:
        inside = True
        while True:
            now = place()
            # An engine that is done with leaves the line to the one that follows it.
            if (now[2] or inside) and not _quietly(lambda now=now: self._write(store, now)):
                return
            inside = now[2]
            time.sleep(self._beat_seconds)

    def _write(self, store: Any, place: Place) -> None:
        doing, since, inside = place
        line = {"doing": doing, "seconds": time.monotonic() - since, "inside": inside, "at": time.time()}
        store.set(_key(self._rank), json.dumps(line))

    def _lines(self, store: Any) -> Sequence[str]:
        rows = [self._line(store, rank) for rank in range(self._world_size)]
        rows.sort(key=lambda row: -row[0])
        more = [f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        return [text for _, text in rows[:SHOWN]] + more

    def _line(self, store: Any, rank: int) -> tuple[float, str]:
        """Seconds without a sign of life or in one place, and the line."""
        if not store.check([_key(rank)]):
            return float("inf"), f"rank {rank}: has not begun a step"
        line = json.loads(store.get(_key(rank)))
        silent = max(0.0, time.time() - line["at"])
        seconds = line["seconds"] + silent
        if line["inside"] and silent > 2.5 * self._beat_seconds:
            return (
                seconds,
                f"rank {rank}: no sign of life for {silent:.1f} s, stopped or dead; it was in {line['doing']}",
            )
        return seconds, f"rank {rank}: in {line['doing']} for {seconds:.1f} s"


def of_default_group(rank: int, world_size: int, beat_seconds: float) -> Whereabouts | None:
    """Whereabouts in the default group's store; None for a rank alone, or for backends without a store."""
    if world_size == 1:
        return None
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):  # MPI
        return None
    return None if store is None else Whereabouts(store, rank, world_size, beat_seconds)


def _key(rank: int) -> str:
    return f"deepspeed_pulse/whereabouts/{rank}"


def _quietly(act: Callable[[], None]) -> bool:
    """Run ``act``; False where it raised: the store is gone, which others report."""
    try:
        act()
    except Exception:
        return False
    return True
