"""Real ranks for tests: one process a rank over gloo, each with a timeout, none left behind.

Importing takes seconds, so one process does it and then forks into the ranks (:mod:`support.forkserver`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.children import Server, forked, settle
from support.forkserver import WITHOUT_US

TESTS = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """Below the ports that the kernel gives to connections: those of other ranks would take it before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launch(
    target: str,
    world: int,
    arguments: Any = None,
    *,
    timeout: float = 300.0,
    grace: float = 20.0,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    without_us: bool = False,
) -> list[Any]:
    """Run ``module:function`` on ``world`` ranks with one JSON argument.

    As a launcher does, the others are ended ``grace`` seconds after one has failed; all are at the ``timeout``.
    What ``environment`` has goes before the usual one of ranks on the CPU. ``without_us``: nothing has imported
    deepspeed_pulse before.

    Returns:
        Per rank (exit status, output). With ``check`` a rank that fails is an error showing its output.
    """
    whole = {**_environment(world), **(environment or {}), **({WITHOUT_US: "1"} if without_us else {})}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = [target, json.dumps(arguments), str(folder), str(world), str(timeout), str(grace)]
        log = folder / "parent.log"
        status = _run(whole, asked, log, timeout + 120)
        if status != 0:
            raise AssertionError(f"{target}: no ranks:\n{log.read_text(errors='replace')[-6000:]}")
        statuses = json.loads((folder / "statuses.json").read_text())
        found = [(statuses[rank], (folder / f"rank{rank}.log").read_text(errors="replace")) for rank in range(world)]
    if check:
        bad = [rank for rank, (status, _) in enumerate(found) if status != 0]
        if bad:
            shown = "\n".join(f"--- rank {rank}, status {found[rank][0]}\n{found[rank][1][-6000:]}" for rank in bad)
            raise AssertionError(f"{target} failed on ranks {bad}:\n{shown}")
    return found


PER_LAUNCH = (
    *("WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "PYTEST_CURRENT_TEST"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE"),
    *("STANDIN_WAITS", "STANDIN_KERNEL_DELAY_US", "STANDIN_MESSAGE_DELAY_US"),
)
"""What no import depends on."""

_SERVERS = 4
"""At most so many at a time, some 300 MB each: the CPU's, and the stand-in's, each with this package and without."""

_servers: list[Server] = []
"""The one that was asked last comes last."""


def _environment(world: int) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }


def _run(environment: dict[str, str], asked: list[str], log: Path, timeout: float) -> int:
    """Exit status of the parent of ranks, forked from a process that imported under the same environment."""
    settled = {name: value for name, value in environment.items() if name not in PER_LAUNCH}
    server = next((one for one in _servers if one.works and one.environment == settled), None)
    if server is None:
        server = Server("support.forkserver", TESTS.parent, settled)
    kept = [one for one in _servers if one.works and one is not server]
    for old in kept[: 1 - _SERVERS]:
        old.end()
    _servers[:] = [*kept[1 - _SERVERS :], server]
    return int(server.ask({"arguments": asked, "environment": environment, "log": str(log)}, timeout))


def launch_ranks(target: str, arguments: str, folder: str, world: str, timeout: str, grace: str) -> None:
    """Import what ranks need, fork into them, and write their exit statuses when all have ended."""
    import faulthandler
    import importlib

    import deepspeed

    faulthandler.enable()
    # A rank that a test kills while upstream compiles this kernel would leave a lock that hangs all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module, function = target.split(":")
    run = getattr(importlib.import_module(module), function)
    settle()
    ranks = []
    for rank in range(int(world)):
        ranks.append(fork_rank(rank, run, json.loads(arguments), log=Path(folder) / f"rank{rank}.log"))
    statuses = end_all(ranks, float(timeout), float(grace))
    (Path(folder) / "statuses.json").write_text(json.dumps(statuses))


def fork_rank(
    rank: int, run: Callable[[Any], None], argument: Any, *, log: Path | None = None, **environment: str
) -> int:
    """A process that runs ``run(argument)`` as a rank and ends; its id.

    Args:
        log: where it writes; left out, where this process does.
        environment: set in it.
    """

    def be_a_rank() -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **environment)
        run(argument)
        _end_with_the_device()

    return forked(be_a_rank, log=log)


def _end_with_the_device() -> None:
    """What a rank was asked to send may still be on its way on an asynchronous device, which ends with the process."""
    if "torch_npu" not in sys.modules:
        return
    import torch

    torch.npu.synchronize()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _is_stopped(process: int) -> bool:
    """By a signal (SIGSTOP); such a process ends of itself at no time."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def end_all(ranks: list[int], timeout: float, grace: float) -> list[int]:
    """Wait for all processes; end the others when one has failed, and what is left at the timeout."""
    deadline = time.monotonic() + timeout
    statuses: dict[int, int] = {}
    while len(statuses) < len(ranks):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            statuses[process] = os.waitstatus_to_exitcode(status)
            if statuses[process] != 0:
                deadline = min(deadline, time.monotonic() + grace)
            continue
        left = [rank for rank in ranks if rank not in statuses]
        if time.monotonic() > deadline or (any(statuses.values()) and all(map(_is_stopped, left))):
            for rank in left:
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.05)
    return [statuses[rank] for rank in ranks]
