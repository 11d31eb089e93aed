"""``ds_pulse tune --verify K``: the best choices run for a few steps on this machine, and ranked by what they took."""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from deepspeed_pulse.cli.terminal import quiet
from deepspeed_pulse.errors import ConfigError, RunError
from deepspeed_pulse.ir.choice import Trial, Tuning, Verdict
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.fields import write_json
from deepspeed_pulse.ir.profile import Profile

STEPS = 5
"""Measured steps of a choice; its time is their median."""

GRACE_SECONDS = 10.0
"""So long the other ranks may still say what they saw, after one has failed."""

Progress = Callable[[int, int, float], None]
"""Told how many choices have been run, how many will be, and the most samples/s so far."""


def check_machine(cluster: Cluster, world: int) -> None:
    """A :class:`ConfigError` where the choices need more ranks than there are devices, or links of several nodes."""
    if world > cluster.ranks_per_node:
        raise ConfigError(
            f"--verify runs on this machine alone: {world} ranks of cluster {cluster.name!r} are on "
            f"{-(-world // cluster.ranks_per_node)} nodes, whose links are not here; leave out --verify, or tune for "
            f"the {cluster.ranks_per_node} ranks of one node with --world"
        )
    with quiet():
        from deepspeed_pulse.engine.verifying import available

        device, devices = available()
    if world > devices:
        what = "cores, a rank needs one of its own" if device == "cpu" else f"{device} devices"
        raise ConfigError(
            f"--verify: {world} ranks, this machine has {devices} {what}; leave out --verify, or tune for "
            "fewer ranks with --world"
        )


def verify(
    tuning: Tuning, count: int, *, model: str, granularity: str | None, seconds: float, progress: Progress | None
) -> Tuning:
    """The tuning with the best ``count`` choices run, ranked by measurement, before those that were not.

    ``model``: what the ranks build, as ``ds_pulse profile`` takes it. ``seconds``: that one choice may take, start and
    all. Raises :class:`RunError` where none of them ran.
    """
    chosen = tuning.ranked[:count]
    measured: list[Trial] = []
    for trial in chosen:
        measured.append(_run(trial, tuning.profiles[trial.choice.microbatch_size], model, granularity, seconds))
        if progress is not None:
            progress(len(measured), len(chosen), max(found.measured or 0.0 for found in measured))
    ran = sorted((found for found in measured if found.plan), key=lambda found: -(found.measured or 0.0))
    if not ran:
        raise RunError(f"--verify: none of the best {len(chosen)} choices ran; the first: {measured[0].reason}")
    failed = tuple(found for found in measured if not found.plan)
    return replace(tuning, trials=(*ran, *tuning.ranked[count:], *failed, *tuning.rejected))


def _run(trial: Trial, profile: Profile, model: str, granularity: str | None, seconds: float) -> Trial:
    choice, dtype = trial.choice, None if ":" in model else profile.dtype
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "plan.json"
        plan.write_text(trial.planned.to_json(), encoding="utf-8")
        task = {
            "model": model,
            "sizes": {"granularity": granularity, "dtype": dtype, "microbatch_size": choice.microbatch_size},
            "layers": [layer.name for layer in profile.layers],
            "config": choice.ds_config(profile, str(plan)),
            "steps": {"pipeline_ranks": choice.pipeline_ranks, "steps": STEPS},
        }
        (folder / "task.json").write_text(write_json(task), encoding="utf-8")
        problem = _launch(folder, choice.num_ranks, seconds)
        if problem:
            return replace(trial, plan=None, verdict=Verdict.FAILED, reason=problem)
        times = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return replace(trial, measured=1e3 * choice.global_batch / statistics.median(times))


def _launch(folder: Path, world: int, seconds: float) -> str:
    """Run the task in the folder on so many ranks; what went wrong, or nothing."""
    common = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(_free_port())
    common.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "deepspeed_pulse.cli.verified_rank", str(folder)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"rank{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return _wait(ranks, folder, seconds)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> str:
    """The last line that the first failed rank wrote, or that it took too long, or nothing."""
    deadline = time.monotonic() + seconds
    failed: list[int] = []
    while True:
        states = [process.poll() for process in ranks]
        if not failed and any(states):
            failed = [rank for rank, state in enumerate(states) if state]
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if None not in states or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    if failed:
        lines = (folder / f"rank{failed[0]}.log").read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return f"rank {failed[0]}: {written[-1] if written else 'ended without a word'}"
    return f"took longer than {seconds:g} s; --verify-seconds gives it more" if None in states else ""


def _free_port() -> int:
    """Below the ports that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
