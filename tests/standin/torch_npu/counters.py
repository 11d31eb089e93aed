"""What the host waited for and copied, and from which line of Python.

Between ``start`` and ``stop`` every event is kept with the place that caused it: the innermost line outside of torch,
the stand-in and DeepSpeed's thin layers over them; "backward" for autograd's own threads, which run no Python.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from torch_npu import library

WAITS = ("device", "stream", "event", "item", "copy to host", "copy to device", "result", "poll", "communicator")
"""Kinds of events in which the host waits: for the whole device, for a stream or an event, for a number, for a copy,
for a result whose size follows from data, for a message (NCCL's wait with a timeout), for a communicator's ranks."""

COPIES = ("pinned to device", "pageable to device", "device to pinned", "device to pageable")
"""Kinds of copies, with bytes."""

OPERATIONS = ("item", "copy to host", "copy to device", "result")
"""Kinds of waits that ``set_sync_debug_mode`` warns of: operations, and none that a program asks for by name."""

SHAPE = "shape"
"""The stand-in's own: a shape was found by running the operator on zeros. No wait."""

_HERE = str(Path(__file__).parent)
_LAYERS = (str(Path(torch.__file__).parent), _HERE, "deepspeed/comm", "deepspeed/accelerator", "deepspeed/utils/timer")


@dataclass(frozen=True, kw_only=True)
class Happening:
    """One event: its kind, bytes of a copy, what it is of, and the place in Python."""

    kind: str
    num_bytes: int
    name: str
    place: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """A communicator: its name, whether for messages between two ranks alone, and HCCL's buffer, MB each way."""

    name: str
    for_messages: bool
    buffer_mb: int


COMMUNICATORS: list[Made] = []
"""All that were made in this process."""

_found: list[Happening] = []
_counting = False
_warning = False


def start() -> None:
    """Count from here, from nothing."""
    global _counting
    _found.clear()
    _counting = True
    _listen()


def stop() -> list[Happening]:
    """What was found since ``start``."""
    global _counting
    _counting = False
    _listen()
    return list(_found)


def set_sync_debug_mode(mode: int | str) -> None:
    """As torch-npu's and torch.cuda's: "warn" warns of every operation in which the host waits, "default" does not."""
    global _warning
    if mode not in ("default", "warn", 0, 1):
        raise ValueError(f"expected 'default' or 'warn', found {mode!r}")
    _warning = mode in ("warn", 1)
    _listen()


def _listen() -> None:
    library.note_to(note if _counting or _warning else None)


def note(kind: str, num_bytes: int, name: str) -> None:
    """Called by the library too, from any thread."""
    if _warning and kind in OPERATIONS:
        file, _, line = place_of(sys._getframe(1)).partition(":")
        warnings.warn_explicit("called a synchronizing NPU operation", UserWarning, file, int(line or 0))
    if _counting:
        _found.append(Happening(kind=kind, num_bytes=num_bytes, name=name, place=place_of(sys._getframe(1))))


def communicator(made: Made) -> None:
    COMMUNICATORS.append(made)
    note("communicator", 0, made.name)


def place_of(frame: FrameType | None) -> str:
    """``file.py:line`` of the innermost line that is nobody's layer; "backward" where there is no Python."""
    while frame is not None and any(layer in frame.f_code.co_filename for layer in _LAYERS):
        frame = frame.f_back
    if frame is None:
        return "backward"
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"


def waits(found: list[Happening]) -> Counter[tuple[str, str]]:
    """(kind, place) of all in which the host waited."""
    return Counter((h.kind, h.place) for h in found if h.kind in WAITS)


def copies(found: list[Happening]) -> Counter[tuple[str, str]]:
    """(kind, place) of all copies between host and device."""
    return Counter((h.kind, h.place) for h in found if h.kind in COPIES)
