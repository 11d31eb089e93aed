"""What the training program itself is doing: seen from another thread, so also while it waits.

Frames of a thread that runs must not be held by another one (CPython 3.11 crashes at times), so the interpreter's own
dump of the stacks is read, which holds none.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch

WRAPPERS = frozenset({"wrapper", "log_wrapper"})

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_TORCH, _DEEPSPEED = (os.path.join(os.path.dirname(str(module.__file__)), "") for module in (torch, deepspeed))
_COMMUNICATION = (os.path.join(_TORCH, "distributed", ""), os.path.join(_DEEPSPEED, "comm", ""))
_OWN = os.path.join(Path(__file__).parents[2], "")


def communication() -> str | None:
    """The collective, or the send or receive, that the main thread is in and the program itself has called.

    "send, called at loader.py:88"; None where there is none, and for what this package calls.
    """
    called: str | None = None
    for file, line, function in _calls(threading.main_thread().ident or 0):
        if not file.startswith((_TORCH, _DEEPSPEED)):
            if called is None or file.startswith(_OWN):
                return None
            return f"{called}, called at {Path(file).name}:{line}"
        if file.startswith(_COMMUNICATION) and function not in WRAPPERS:
            called = function
    return None


def _calls(thread: int) -> Iterator[tuple[str, str, str]]:
    """(file, line, function) of a thread's calls, the innermost first."""
    with tempfile.TemporaryFile("w+", errors="replace") as dump:
        faulthandler.dump_traceback(dump, all_threads=True)
        dump.seek(0)
        wanted = False
        for line in dump:
            header, call = _THREAD.match(line), _CALL.match(line)
            if header is not None:
                wanted = int(header[1], 16) == thread
            elif wanted and call is not None:
                yield call[1], call[2], call[3]
