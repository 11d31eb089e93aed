"""In what the host waits for its device, by line of Python, on any accelerator whose module says so.

That is ``set_sync_debug_mode``, as torch.cuda and torch-npu have it: it warns of every operation in which the host
waits (a number that is read, a copy from pageable memory, a result whose size follows from data). Calls of
``synchronize`` are counted beside that. What torch.distributed waits in by itself is seen by neither.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

_WORDS = "called a synchronizing"
_LAYERS = ("deepspeed.comm", "deepspeed.accelerator", "deepspeed.utils.timer", "warnings", __name__)


@contextmanager
def host_waits() -> Iterator[Counter[str] | None]:
    """What the calling thread, and backward, wait in until the end of the block, by place; None: not counted here.

    A step takes longer meanwhile.
    """
    set_mode = getattr(torch.get_device_module(get_accelerator().device_name()), "set_sync_debug_mode", None)
    if set_mode is None:
        yield None
        return
    found: Counter[str] = Counter()
    inside = False

    def called(frame: FrameType, event: str, function: Any) -> None:
        nonlocal inside
        if event.startswith("c_") and function.__name__.endswith("synchronize"):
            inside = event == "c_call"
            if inside:
                found[_place(frame)] += 1

    def warned(message: Warning | str, *_: Any, **__: Any) -> None:
        if not inside and _WORDS in str(message):
            found[_place(sys._getframe(1))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = warned
        set_mode("warn")
        sys.setprofile(called)
        try:
            yield found
        finally:
            sys.setprofile(None)
            set_mode("default")


def _place(frame: FrameType | None) -> str:
    """``file.py:line`` of the innermost line outside of torch and of thin layers over it."""
    while frame is not None and _is_layer(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    if frame is None:
        return "backward"
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"


def _is_layer(module: str) -> bool:
    return module.partition(".")[0].startswith("torch") or module.startswith(_LAYERS)
