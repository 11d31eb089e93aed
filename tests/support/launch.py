"""Real ranks for tests: one process a rank over gloo, each with a timeout, none left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """Below the ports that the kernel gives to connections: those of other ranks would take it before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launch(
    target: str, world: int, arguments: Any = None, *, timeout: float = 300.0, grace: float = 20.0, check: bool = True
) -> list[Any]:
    """Run ``module:function`` on ``world`` ranks with one JSON argument; ``timeout``, ``grace``: see :func:`end_all`.

    Returns:
        Per rank (exit status, output). With ``check`` a rank that fails is an error showing its output.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
        ranks = []
        for rank in range(world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, "-m", "support.launch", target, json.dumps(arguments)]
            with logs[rank].open("w") as log:
                ranks.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=TESTS.parent)
                )
        end_all(ranks, timeout, grace)
        found = [
            (process.returncode, log.read_text(errors="replace")) for process, log in zip(ranks, logs, strict=True)
        ]
    if check:
        bad = [rank for rank, (status, _) in enumerate(found) if status != 0]
        if bad:
            shown = "\n".join(f"--- rank {rank}, status {found[rank][0]}\n{found[rank][1][-6000:]}" for rank in bad)
            raise AssertionError(f"{target} failed on ranks {bad}:\n{shown}")
    return found


def end_all(ranks: list[subprocess.Popen[bytes]], timeout: float, grace: float = 20.0) -> None:
    """Wait for all; as a launcher does, end the others when one fails; kill what is left at the timeout."""
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in ranks):
        if any(p.poll() not in (None, 0) for p in ranks):
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.05)
    for process in ranks:
        process.wait(timeout=30)


def main() -> None:
    """One rank: run the target, then leave without waiting for threads of the process group."""
    import faulthandler
    import importlib

    import deepspeed

    faulthandler.enable()
    # A rank that a test kills while upstream compiles this kernel would leave a lock that hangs all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module, function = sys.argv[1].split(":")
    getattr(importlib.import_module(module), function)(json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
