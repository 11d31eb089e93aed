"""One job at a time saves into a folder: its first rank holds a lock on a file there until its process ends.

The operating system drops the lock however the process ends, so a restarted job never finds a stale one.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed_pulse.errors import FileError

LOCK_FILE = ".pulse.lock"

_held: dict[Path, int] = {}
"""Folder to the open lock file. Locks belong to the process, whichever engine took them."""


def claim(folder: Path) -> None:
    """Take a folder for this process, until it ends.

    Raises:
        FileError: another process saves there.
        OSError: the lock file cannot be written.
    """
    folder, path = folder.resolve(), folder / LOCK_FILE
    if folder in _held and _is_open_file(_held[folder], path):
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # not flock: that one is inherited by the workers of data loaders and outlives the job with them
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(handle, 200).decode(errors="replace").strip()
        os.close(handle)
        raise FileError(
            f"{folder}: another job saves into this folder ({holder or 'unknown'}); nothing was written; give every "
            "job a folder of its own",
            more="two-jobs-one-folder",
        ) from None
    except OSError as problem:
        print(
            f"pulse: warning: {folder}: no locks here ({problem.strerror}); let only one job save into it", flush=True
        )
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"host {socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
    _held[folder] = handle


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
