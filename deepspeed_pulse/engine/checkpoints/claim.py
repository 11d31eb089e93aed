"""One job at a time saves into a folder: its first rank holds a lock on a file there until its process ends.

The operating system drops the lock however the process ends. Of a host that is lost a file server keeps it for a while.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed_pulse.errors import FileError

LOCK_FILE = ".pulse.lock"

WAIT_SECONDS = 120.0
"""How long another's lock is waited for: NFS keeps that of a lost host for some 90 s. Other ranks wait meanwhile, and
would do so for longer (``config.START_SECONDS``)."""

_PAUSE_SECONDS = 1.0
"""Between two tries."""

_held: dict[Path, int] = {}
"""Folder to the open lock file. Locks belong to the process, whichever engine took them."""


def claim(folder: Path) -> None:
    """Take a folder for this process, until it ends; where another has it, wait for that, and say so once.

    Raises:
        FileError: another process still has it after :data:`WAIT_SECONDS`.
        OSError: the lock file cannot be written.
    """
    folder, path = folder.resolve(), folder / LOCK_FILE
    if folder in _held and _is_open_file(_held[folder], path):
        return
    end, told, holder = time.monotonic() + WAIT_SECONDS, False, "unknown"
    while (handle := _locked(folder, path)) is None:
        with suppress(OSError):
            holder = path.read_text(errors="replace")[:200].strip() or holder
        if time.monotonic() >= end:
            raise FileError(
                f"{folder}: another job saves into this folder ({holder}); nothing was written; waited "
                f"{WAIT_SECONDS:g} s for its end; give every job a folder of its own, or, if that host is lost, remove "
                f"{path}",
                more="two-jobs-one-folder",
            )
        if not told:
            print(
                f"pulse: {folder}: another job ({holder}) has the lock of this folder; waiting up to "
                f"{WAIT_SECONDS:g} s for it",
                flush=True,
            )
            told = True
        time.sleep(_PAUSE_SECONDS)
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
    _held[folder] = handle


def _locked(folder: Path, path: Path) -> int | None:
    """The lock file, locked; None where another process has it. Opened anew: a lost host's may have been removed."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # not flock: that one is inherited by the workers of data loaders and outlives the job with them
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        return None
    except OSError as problem:
        print(
            f"pulse: warning: {folder}: no locks here ({problem.strerror}); let only one job save into it", flush=True
        )
    return handle


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder for a while, or go on holding it."""
    held = folder.resolve() in _held
    claim(folder)
    try:
        yield
    finally:
        if not held:
            os.close(_held.pop(folder.resolve()))


def _is_open_file(handle: int, path: Path) -> bool:
    """False when the folder was removed and made again since."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
