"""A process that has imported what all ranks need, and forks a launcher of ranks whenever a test asks for one.

Importing torch, DeepSpeed and diffusers takes five seconds of a processor, a fork a hundredth of one.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


class ForkServer:
    """The other end of one, in the process that runs tests.

    Args:
        environment: in which it imports.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        command = [sys.executable, "-m", "support.forkserver"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, cwd=TESTS.parent)
        self.works = True

    def run(self, request: dict[str, Any], timeout: float) -> int:
        """Exit status of the launcher. Whatever ends the wait, no process is left behind."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.works = False
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout)
            if not ready:
                raise TimeoutError(f"{request['arguments'][0]}: no end within {timeout:g} s")
            status = int(self._process.stdout.readline())
            self.works = True
        finally:
            if not self.works:
                self.end()
        return status

    def end(self) -> None:
        """With all that it has started."""
        self.works = False
        self._process.kill()
        self._process.communicate(timeout=30)


def main() -> None:
    """Import, and fork a launcher for each line that comes; end with the last one."""
    from diffusers import HunyuanDiT2DModel, UNet2DConditionModel, UNet2DModel  # noqa: F401
    from transformers import CLIPTextModel  # noqa: F401

    replies = os.dup(1)
    for line in sys.stdin:
        launcher = os.fork()
        if not launcher:
            _launch(json.loads(line))
        _, status = os.waitpid(launcher, 0)
        os.write(replies, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _launch(request: dict[str, Any]) -> None:
    from support.launch import launch_ranks

    status = 1
    try:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(request["environment"])
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for end, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(file, end)
        launch_ranks(*request["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
