"""pytest from a process that has imported what tests need, so that a run of few tests takes a second and not ten.

Started in a tree of its own. A line of JSON on standard input, ``{"arguments": [...], "seconds": 60}``, is answered by
one: ``{"status": 0, "output": "..."}``; status None is a run that did not end in time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

BROKEN = 99
"""Exit status of a run that was none."""


class ForkingPytest:
    """The other end: a process that runs tests in a tree.

    Args:
        tree: copy of the project; its package and its tests are imported, none before a run.
    """

    def __init__(self, tree: Path) -> None:
        paths = os.pathsep.join((str(tree), str(tree / "tests")))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        command = [sys.executable, "-m", "support.forking_pytest"]
        self._process = subprocess.Popen(
            command,
            cwd=tree,
            env={**kept, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, arguments: list[str], seconds: float) -> tuple[int | None, str]:
        """Exit status, None where it did not end in time, and what pytest wrote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return found["status"], found["output"]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)


def main() -> None:
    import deepspeed  # noqa: F401
    import diffusers  # noqa: F401
    import highspy  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import scipy.optimize  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = os.fork()
            if not process:
                _run(asked["arguments"], output)
            status = _end(process, asked["seconds"])
            output.seek(0)
            print(json.dumps({"status": status, "output": output.read()[-20_000:]}), flush=True)


def _run(arguments: list[str], output: Any) -> None:
    """The child: a group of its own, so that what it starts ends with it."""
    status = BROKEN
    try:
        os.setsid()
        sys.stdin.close()
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        status = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end(process: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


if __name__ == "__main__":
    main()
