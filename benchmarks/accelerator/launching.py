"""Ranks on the accelerators of this machine, each a fresh process: a device that was used cannot be forked."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("rank.py")
GRACE_SECONDS = 15.0
"""So long the other ranks may still say what they saw, after one has failed."""


class RanksFailed(RuntimeError):
    """A rank failed or took too long: ``reason`` in a line, and the end of every rank's log."""

    def __init__(self, reason: str, logs: str) -> None:
        super().__init__(f"{reason}\n{logs}")
        self.reason = reason


def launch(task: dict[str, Any], world: int, *, timeout: float) -> list[Any]:
    """Run a task of ``rank.py`` on so many ranks; what each of them wrote.

    Args:
        timeout: seconds after which all ranks are ended. They are, too, soon after one has failed.

    Raises:
        RanksFailed: a rank failed or the time was over.
    """
    common = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task))
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = stack.enter_context((folder / f"rank{rank}.log").open("w"))
            process = subprocess.Popen([sys.executable, str(RANK), name], env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
            ranks.append(process)
        problem = _wait(ranks, time.monotonic() + timeout)
        if problem is not None:
            rank, why = problem
            logs = [(folder / f"rank{rank}.log").read_text(errors="replace")[-4000:] for rank in range(world)]
            reason = why or _last_line(logs[rank])
            raise RanksFailed(f"rank {rank}: {reason}", "\n".join(f"--- rank {r}\n{log}" for r, log in enumerate(logs)))
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> tuple[int, str] | None:
    """The rank that failed first, or was too late, and why, if it has not said so itself."""
    failed: int | None = None
    while True:
        states = [process.poll() for process in ranks]
        if failed is None and any(states):
            failed = next(rank for rank, state in enumerate(states) if state)
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if None not in states or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if failed is not None:
        return failed, "" if ranks[failed].poll() == 1 else f"ended with status {ranks[failed].poll()}"
    return (states.index(None), "took too long") if None in states else None


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "ended without a word"


def _free_port() -> int:
    """Below the ports that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
