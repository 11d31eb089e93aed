"""What the training program itself is doing: seen from another thread, so also while it waits.

Frames of a thread that runs must not be held by another one (CPython 3.11 crashes at times), so the interpreter's own
dump of the stacks is read, which holds none.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import deepspeed
import torch

WRAPPERS = frozenset({"wrapper", "log_wrapper"})

_HEADER = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_TORCH, _DEEPSPEED = (os.path.join(os.path.dirname(str(module.__file__)), "") for module in (torch, deepspeed))
_COMMUNICATION = (os.path.join(_TORCH, "distributed", ""), os.path.join(_DEEPSPEED, "comm", ""))
_OWN = os.path.join(Path(__file__).parents[2], "")


class Program:
    """The process's main thread. The main thread must make it; one that another thread made sees nothing."""

    def __init__(self) -> None:
        self._thread = threading.main_thread().ident or 0
        self._dump = _dump_of_this_thread() if threading.get_ident() == self._thread else lambda file: None

    def communication(self) -> str | None:
        """The collective, or the send or receive, that the thread is in and the program itself has called.

        "send, called at loader.py:88"; None where there is none, and for what this package calls.
        """
        called: str | None = None
        for file, line, function in self._calls():
            if not file.startswith((_TORCH, _DEEPSPEED)):
                if called is None or file.startswith(_OWN):
                    return None
                return f"{called}, called at {Path(file).name}:{line}"
            if file.startswith(_COMMUNICATION) and function not in WRAPPERS:
                called = function
        return None

    def _calls(self) -> Iterator[tuple[str, str, str]]:
        """(file, line, function) of the thread's calls, the innermost first."""
        with tempfile.TemporaryFile("w+", errors="replace") as dump:
            self._dump(dump)
            dump.seek(0)
            wanted = True  # a dump of one thread has no such header
            for line in dump:
                header, call = _HEADER.match(line), _CALL.match(line)
                if header is not None:
                    wanted = int(header[1], 16) == self._thread
                elif wanted and call is not None:
                    yield call[1], call[2], call[3]


def _dump_of_this_thread() -> Callable[[IO[str]], None]:
    """What writes the stack of the thread that calls this; other threads may call what is returned.

    CPython 3.11 puts a thread into its list before the thread's state is whole. A walk over all of them crashes then,
    and threads of torch and gloo come and go. So it is asked for one thread there, by a function that faulthandler
    calls itself; ``ctypes.pythonapi`` holds the interpreter's lock meanwhile, and the stack stands still.
    """
    if sys.version_info[:2] != (3, 11):
        return faulthandler.dump_traceback  # all threads
    of_this_thread, dump = ctypes.pythonapi.PyThreadState_Get, ctypes.pythonapi._Py_DumpTraceback
    of_this_thread.restype, dump.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    state = of_this_thread()
    return lambda file: dump(file.fileno(), state)
