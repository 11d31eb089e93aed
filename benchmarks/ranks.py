"""Ranks of a benchmark on this machine, and layers that sleep instead of computing.

Importing torch and DeepSpeed takes seconds, so the benchmark's process does it once and forks into the ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_pulse import LayerSpec

# Before torch is imported: a rank is one process with one thread, whatever accelerator this machine has.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

import torch
from namespaces import Namespace, enter

torch.set_num_threads(1)


class RanksFailed(RuntimeError):
    """A rank failed or took too long; the text ends with what the ranks wrote."""


def launch(
    run: Callable[[Any], Any],
    world: int,
    arguments: Any = None,
    *,
    namespaces: Sequence[Namespace] = (),
    timeout: float = 300.0,
) -> Any:
    """Call ``run(arguments)`` on every rank, each a process of its own; return what rank 0 returned.

    Args:
        run: returns something that JSON can hold.
        namespaces: the network each rank lives in; by default all are in this one's.
        timeout: seconds after which all ranks are ended. They are, too, as soon as one has failed.

    Raises:
        RanksFailed: a rank failed or the time was over.
    """
    import deepspeed

    # Ranks that are ended while DeepSpeed compiles this kernel would leave a lock that hangs all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    common = {"WORLD_SIZE": str(world), "MASTER_PORT": str(_free_port())}
    common["MASTER_ADDR"] = namespaces[0].address if namespaces else "127.0.0.1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.stdout.flush()
        ranks: dict[int, int] = {}
        try:
            for rank in range(world):
                process = os.fork()
                if process == 0:
                    home = namespaces[rank] if namespaces else None
                    os.environ.update(common, RANK=str(rank), **_place(rank, world, home))
                    _be_rank(run, arguments, folder, rank, home)
                ranks[process] = rank
            problem = _wait(ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        if problem:
            logs = [f"--- rank {rank}\n{_tail(folder / f'rank{rank}.log')}" for rank in range(world)]
            raise RanksFailed("\n".join([problem, *logs]))
        return json.loads((folder / "result.json").read_text())


def _free_port() -> int:
    """Below the ports that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _place(rank: int, world: int, home: Namespace | None) -> dict[str, str]:
    """A rank in a namespace of its own is alone on its machine, as far as it can see."""
    if home is None:
        return {"LOCAL_RANK": str(rank), "LOCAL_SIZE": str(world)}
    return {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "GLOO_SOCKET_IFNAME": home.interface}


def _be_rank(run: Callable[[Any], Any], arguments: Any, folder: Path, rank: int, home: Namespace | None) -> None:
    """In a forked process: never returns."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        if home is not None:
            enter(home)
        found = run(arguments)
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # without waiting for threads of the process group


def _wait(ranks: dict[int, int], deadline: float) -> str:
    """Until all have ended, taking them out of ``ranks``; what went wrong, or nothing."""
    while ranks:
        for process in list(ranks):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                rank = ranks.pop(process)
                if status:
                    return f"rank {rank} ended with status {os.waitstatus_to_exitcode(status)}"
        if time.monotonic() > deadline:
            return f"ranks {', '.join(map(str, ranks.values()))} took too long"
        time.sleep(0.02)
    return ""


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""


class Nap(torch.autograd.Function):
    """Sleeps forward and backward: ranks overlap truthfully on few cores. Keeps its output, as layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        y = x.clone()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_ms / 1e3)
        return gradient.clone(), None, None


class Doze(torch.autograd.Function):
    """Sleeps when the gradient of weights is made."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.backward_ms / 1e3)
        return gradient.clone(), None


class Sleeper(torch.nn.Module):
    """A layer that sleeps and adds what it pops.

    Args:
        forward_ms, backward_ms: how long for a microbatch of one sample; larger ones in proportion.
        weight_ms: of ``backward_ms``, for gradients of weights.
        param_bytes: of its parameters, float32, all with a gradient.
        stashes: returns its output a second time.
    """

    def __init__(
        self,
        forward_ms: float,
        backward_ms: float,
        *,
        weight_ms: float = 0.0,
        param_bytes: int = 4,
        stashes: bool = False,
    ) -> None:
        super().__init__()
        self.weight_ms = weight_ms
        self.weight = torch.nn.Parameter(torch.zeros(max(1, param_bytes // 4)))
        self.forward_ms, self.backward_ms, self.stashes = forward_ms, backward_ms, stashes

    def forward(self, x: torch.Tensor, *skips: torch.Tensor) -> Any:
        samples = len(x)
        weight = Doze.apply(self.weight, samples * self.weight_ms) if self.weight_ms else self.weight
        y = Nap.apply(x + weight.mean(), samples * self.forward_ms, samples * (self.backward_ms - self.weight_ms))
        for skip in skips:
            y = y + skip
        return (y, y) if self.stashes else y


def sleepers(forward_ms: Sequence[float], *, param_bytes: int = 4, halves: bool = False) -> list[LayerSpec]:
    """Layers that sleep so long forward and twice as long backward; the first half has nested skips to the second.

    ``halves``: half of a backward is for gradients of weights.
    """
    from deepspeed_pulse import LayerSpec

    half = len(forward_ms) // 2
    return [
        LayerSpec(
            Sleeper,
            ms,
            2 * ms,
            weight_ms=ms if halves else 0.0,
            param_bytes=param_bytes,
            stashes=i < half,
            stash=f"skip{i}" if i < half else (),
            pop=() if i < half else f"skip{2 * half - 1 - i}",
        )
        for i, ms in enumerate(forward_ms)
    ]
