"""pytest from a process that has imported what tests need, so that a run of few tests takes a second and not ten.

Started in a tree of its own. It is asked with pytest's arguments and how many seconds they may take, and answers with
the exit status, None where they took longer, and the output.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.children import Server, answer, forked

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
        self._server = Server("support.forking_pytest", tree, {**kept, "PYTHONPATH": paths})

    def run(self, arguments: list[str], seconds: float) -> tuple[int | None, str]:
        """Exit status, None where it did not end in time, and what pytest wrote."""
        status, output = self._server.ask([arguments, seconds], seconds + 60)
        return status, output

    def end(self) -> None:
        self._server.end()


def imports() -> None:
    import deepspeed  # noqa: F401
    import diffusers  # noqa: F401
    import highspy  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import scipy.optimize  # noqa: F401


def outcome(request: tuple[list[str], float]) -> tuple[int | None, str]:
    """Of a run in a group of its own, so that what it starts ends with it."""
    arguments, seconds = request
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = forked(lambda: _run(arguments), log=output.fileno(), broken=BROKEN, alone=True)
        status = _end(process, seconds)
        output.seek(0)
        return status, output.read()[-20_000:]


def _run(arguments: list[str]) -> int:
    sys.stdin.close()
    return int(pytest.main(arguments))


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
    answer(imports, outcome)
