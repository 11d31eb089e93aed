"""Many worlds of ranks in one launch, forked from one process that has imported everything: seconds saved a rank."""

from __future__ import annotations

import importlib
import time
from typing import Any

from support.launch import end_all, fork_rank, free_port

Job = tuple[str, int, Any]
"""(``module:function``, number of ranks, argument)."""

_ROUND_SECONDS, _GRACE_SECONDS = 3600.0, 2.0


def run_jobs(rounds: list[list[Job]]) -> None:
    """The jobs of a round run beside each other; a rank that fails ends all, a moment later."""
    for jobs in rounds:
        started = time.monotonic()
        ranks = [rank for job in jobs for rank in fork_world(*job)]
        statuses = end_all(ranks, _ROUND_SECONDS, _GRACE_SECONDS)
        if any(statuses):
            raise RuntimeError(f"ranks failed, statuses {statuses}")
        names = ", ".join(f"{target} on {world}" for target, world, _ in jobs)
        print(f"ROUND {names}: {time.monotonic() - started:.1f} s", flush=True)


def fork_world(target: str, world: int, argument: Any) -> list[int]:
    module, function = target.split(":")
    run = getattr(importlib.import_module(module), function)
    place = {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "MASTER_PORT": str(free_port())}
    return [fork_rank(rank, run, argument, **place) for rank in range(world)]
