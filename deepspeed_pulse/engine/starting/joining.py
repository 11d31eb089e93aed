"""Ranks that start a process group: where one cannot connect to another, all end.

A pair of gloo's ranks has one that connects and one that waits to be connected to. The one that connects is refused at
once where it was given an address of another host that means its own; the other would wait as long as the timeout is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

_FAILED = "pulse: cannot connect"
_SECONDS = 1.0
"""Between two looks."""

_HEAD_START_SECONDS = 2.0
"""For the rank that failed to say why: a launcher ends all ranks of a host when one has ended."""

_ANSWER_SECONDS = 60.0
"""For the store to be there: ranks start at different times."""

_UNKNOWN = (KeyError, ValueError, RuntimeError)
"""The environment names no store, or none answers."""


@contextmanager
def all_join(reason: str) -> Iterator[None]:
    """While it runs, the process ends with ``reason`` when another rank has left it by a RuntimeError.

    The program may be inside a call that does not return, so it is not asked.
    """
    joined = threading.Event()
    threading.Thread(target=_look, args=(joined, reason), daemon=True).start()
    try:
        yield
    except RuntimeError:
        joined.set()
        _tell()
        raise
    finally:
        joined.set()


def _look(joined: threading.Event, reason: str) -> None:
    try:
        store = _store()
    except _UNKNOWN:
        return  # whoever joins is told so, too
    while not joined.wait(_SECONDS):
        if _has_failed(store) and not joined.wait(_HEAD_START_SECONDS):
            print(f"pulse: joining the process group: another rank could not connect: {reason}", flush=True)
            os._exit(1)


def _has_failed(store: Any) -> bool:
    try:
        return bool(store.check([_FAILED]))
    except RuntimeError:  # it has ended with its rank
        return True


def _tell() -> None:
    try:
        _store().set(_FAILED, os.environ["RANK"])
    except _UNKNOWN:
        return  # where the store was its own, the others see that it ends


def _store() -> Any:
    """A connection of its own: the process group's is not there yet, or busy."""
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_SECONDS),
    )
