"""Processes of this machine: whether a rank's, or the launcher's, is still there. Read from ``/proc``.

Where there is no ``/proc``, or a process is of another machine or another container, nothing is known, and nothing is
said to be gone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = frozenset(
    {"deepspeed", "ds", "torchrun", "accelerate", "deepspeed.launcher.launch", "deepspeed.launcher.runner"}
    | {"torch.distributed.run", "torch.distributed.launch"}
)
"""Programs and modules (``python -m``) that start ranks and end them."""


@dataclass(frozen=True)
class Process:
    """A process: ``machine`` tells kernels and containers apart, ``started`` later processes of the same number."""

    machine: str
    number: int
    started: str

    @classmethod
    def find(cls, number: int) -> Process | None:
        """The process of that number on this machine; None where there is none, or nothing is known."""
        fields = _fields(number)
        return None if fields is None else cls(_machine(), number, fields[_STARTED])

    @property
    def is_gone(self) -> bool:
        """True when it has ended for certain; one that waits for its parent to notice (a zombie) has."""
        if not self.machine or self.machine != _machine():
            return False
        fields = _fields(self.number)
        return fields is None or fields[_STATE] in "ZX" or fields[_STARTED] != self.started


def this_process() -> Process:
    """This one; without a machine where nothing can be known of it."""
    return Process.find(os.getpid()) or Process("", os.getpid(), "")


def launchers() -> tuple[Process, ...]:
    """The launchers that this process was started by, the nearest first; none that only share a shell with it."""
    found = (Process.find(number) for number in _ancestors() if _is_launcher(number))
    return tuple(process for process in found if process is not None)


@functools.cache
def _machine() -> str:
    """Empty where processes cannot be told apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_STATE, _PARENT, _STARTED = 0, 1, 19


def _fields(number: int) -> list[str] | None:
    """Of ``/proc/NUMBER/stat``, behind the program's name, which may hold anything; None without such a process."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def _ancestors() -> Iterator[int]:
    number = os.getppid()
    while number > 1:
        yield number
        fields = _fields(number)
        number = 0 if fields is None else int(fields[_PARENT])


def _is_launcher(number: int) -> bool:
    """By the first words of its command line: ``python -u -m MODULE``, ``python /bin/deepspeed`` or ``torchrun``."""
    try:
        words = Path(f"/proc/{number}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    words = [word for word in words if not word.startswith("-")][:2]
    return any(word in LAUNCHERS or Path(word).name in LAUNCHERS for word in words)
