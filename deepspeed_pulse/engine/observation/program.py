"""What the training program itself is doing: seen from another thread, so also while it waits."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

COMMUNICATION = ("torch.distributed", "deepspeed.comm")
LIBRARIES = ("torch.", "deepspeed.")
WRAPPERS = frozenset({"wrapper", "log_wrapper"})


def communication() -> str | None:
    """The collective, or the send or receive, that the main thread is in and the program itself has called.

    Returns:
        "send, called at loader.py:88"; None where there is none, and for what this package calls.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    called: str | None = None
    while frame is not None and _module(frame).startswith(LIBRARIES):
        name = frame.f_code.co_name
        if _module(frame).startswith(COMMUNICATION) and name not in WRAPPERS:
            called = name
        frame = frame.f_back
    if called is None or frame is None or _module(frame).startswith("deepspeed_pulse"):
        return None
    return f"{called}, called at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
