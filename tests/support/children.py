"""Forked processes: one that runs a function and ends, and one that answers requests from what it has imported."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def forked(run: Callable[[], Any], *, log: Path | int | None = None, broken: int = 1, alone: bool = False) -> int:
    """A process that runs ``run()`` and ends with the number that it returns or exits with, else 0; its id.

    It ends without waiting for threads of a process group.

    Args:
        log: where it writes, a file's name (written to at its end) or descriptor; None: where this process does.
        broken: exit status after an error, which is printed.
        alone: it leads a group of its own; otherwise it dies with this process, whatever happens to that.
    """
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = broken
    try:
        if alone:
            os.setsid()
        else:
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if log is not None:
            file = log if isinstance(log, int) else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
        found = run()
        status = found if isinstance(found, int) else 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = broken if isinstance(stop.code, str) else int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def settle() -> None:
    """What is here now is never looked at again for cycles, nor copied for it into each fork.

    DeepSpeed collects garbage some 15 times while the first rank makes a bf16 optimizer: 0.3 s each.
    """
    gc.collect()
    gc.freeze()


class Server:
    """A process that answers requests, each a value of JSON.

    Args:
        module: its program, which ends in :func:`answer`.
        folder: where it runs.
        environment: its own.
    """

    def __init__(self, module: str, folder: Path, environment: dict[str, str]) -> None:
        self.environment, self.works = environment, True
        command, pipe = [sys.executable, "-m", module], subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe)

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer. Whatever else ends the wait, no process is left behind."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.works = False
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], seconds)
            if not ready:
                raise TimeoutError(f"no answer within {seconds:g} s to {request}")
            found = json.loads(self._process.stdout.readline())
            self.works = True
        finally:
            if not self.works:
                self.end()
        return found

    def end(self) -> None:
        """With all that it has started and that dies with it."""
        self.works = False
        self._process.kill()
        self._process.communicate(timeout=30)


def answer(prepare: Callable[[], Any], reply: Callable[[Any], Any]) -> None:
    """A server's program: imports, then an answer to each request until there are no more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    prepare()
    settle()
    for line in sys.stdin:
        os.write(answers, json.dumps(reply(json.loads(line))).encode() + b"\n")
