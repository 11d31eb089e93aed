"""Many worlds of ranks in one launch, forked from one process that has imported everything: seconds saved a rank."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from typing import Any

from support.launch import free_port

Job = tuple[str, int, Any]
"""(``module:function``, number of ranks, argument)."""


def run_jobs(rounds: list[list[Job]]) -> None:
    """The jobs of a round run beside each other; a rank that fails ends all."""
    for jobs in rounds:
        started = time.monotonic()
        ranks: list[int] = []
        for job in jobs:
            ranks += fork_world(*job)
        wait_for(ranks)
        names = ", ".join(f"{target} on {world}" for target, world, _ in jobs)
        print(f"ROUND {names}: {time.monotonic() - started:.1f} s", flush=True)


def fork_world(target: str, world: int, argument: Any) -> list[int]:
    module, function = target.split(":")
    run = getattr(importlib.import_module(module), function)
    port = free_port()
    sys.stdout.flush()
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
            os.environ.update(MASTER_PORT=str(port))
            be_rank(run, argument)
        ranks.append(pid)
    return ranks


def be_rank(run: Any, argument: Any) -> None:
    """Never returns; ends when the parent does, whatever happens to it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    status = 1
    try:
        run(argument)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(ranks: list[int]) -> None:
    waiting = set(ranks)
    while waiting:
        pid, status = os.wait()
        waiting.discard(pid)
        if status:
            time.sleep(2)  # the others say what they met
            for other in waiting:
                os.kill(other, signal.SIGKILL)
            raise RuntimeError(f"rank {ranks.index(pid)} failed, status {status}")
