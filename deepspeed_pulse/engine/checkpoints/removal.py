"""Old checkpoints are deleted in a thread beside training: they have hundreds of files, and all ranks would wait.

Their folders have lost their names before, so nobody reads one. What the end of a process leaves of one goes with the
next.
"""

from __future__ import annotations

import atexit
import shutil
import threading
from pathlib import Path

from deepspeed_pulse.engine.starting.start import has_failed

_at_a_time = threading.Lock()
"""Two threads would stumble over one another's files."""

_threads: list[threading.Thread] = []


def remove_beside(folder: Path, pattern: str) -> None:
    """Begin to delete the folders in one whose names fit a pattern; what cannot be deleted is told."""
    thread = threading.Thread(target=_remove, args=(folder, pattern), name="pulse-removal", daemon=True)
    thread.start()
    _threads[:] = [*filter(threading.Thread.is_alive, _threads), thread]


def wait() -> None:
    """Return when all is deleted that was begun."""
    for thread in _threads:
        thread.join()


def _remove(folder: Path, pattern: str) -> None:
    with _at_a_time:
        for path in sorted(folder.glob(pattern)):
            try:
                shutil.rmtree(path)
            except FileNotFoundError:  # somebody else has deleted it
                continue
            except OSError as problem:
                print(f"pulse: warning: {path}: an older checkpoint is not deleted: {problem}", flush=True)


@atexit.register
def _end() -> None:
    """A run that ends as it should leaves nothing; one that has failed ends at once, so that others know."""
    if not has_failed():
        wait()
