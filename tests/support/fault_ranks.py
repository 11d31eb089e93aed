"""Ranks that die at named points and runs that go on afterwards; forked from one process that has loaded everything.

A run trains the toy network for six steps on two ranks, saves after every second step, and goes on from the
last checkpoint it finds. A fault strikes once, at the named point, in the third or fourth step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.children import forked
from support.launch import free_port

RANKS, STEPS, SAVE_EVERY = 2, 6, 2
RUN_SECONDS = 90.0

POINTS = (
    "before forward",
    "after forward",
    "before backward",
    "after backward",
    "before send",
    "after receive",
    "before write",
    "after write",
    "before rename",
    "after rename",
)


def strike(point: str, rank: int, mine: int) -> None:
    """Make this rank die at a point, from the fourth step on; writes and renames belong to the save after it."""
    from deepspeed_pulse.engine.checkpoints import files as checkpoint_files
    from deepspeed_pulse.runtime.rank import RankRuntime

    if rank != mine:
        return
    when, what = point.split()
    owners: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "forward": (RankRuntime, "_forward", lambda *_: True),
        "backward": (RankRuntime, "_backward", lambda *_: True),
        "send": (RankRuntime, "_give", lambda *_: True),
        "receive": (RankRuntime, "_take", lambda *_: True),
        "write": (checkpoint_files.SafeCheckpointEngine, "save", lambda *_: True),
        "rename": (checkpoint_files, "rename", lambda source, target: Path(target).name != "latest"),
    }
    owner, name, matters = owners[what]
    genuine = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        armed = ARMED[0] and matters(*args)
        if armed and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = genuine(*args, **kwargs)
        if armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, faulty)


ARMED = [False]


def train(rank: int, port: int, folder: Path, fault: Callable[[int], None]) -> None:
    """One rank of one run; the loss of every step goes to a file."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from support.engine_ranks import data_of, make_engine

    fault(rank)
    engine = make_engine(RANKS, 2, pulse={"solver_seconds": 0, "timeout_seconds": 20})
    if (folder / "latest").is_file():
        engine.load_checkpoint(folder)
    while engine.global_steps < STEPS:
        ARMED[0] = engine.global_steps >= 3
        loss = float(engine.train_batch(data_of(engine, engine.global_steps)).detach())
        if rank == 0:
            with (folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([engine.global_steps, loss]) + "\n")
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(folder)


def run(folder: Path, fault: Callable[[int], None] = lambda rank: None, watch: Any = None) -> list[int]:
    """Fork the ranks; their exit statuses (negative: a signal). Whoever is there after the time is up is an error."""
    folder.mkdir(parents=True, exist_ok=True)
    port, children = free_port(), []
    for rank in range(RANKS):
        children.append(forked(partial(train, rank, port, folder, fault), log=folder / f"rank{rank}.log"))
    if watch is not None:
        watch(children, folder)
    return [reap(child) for child in children]


def reap(child: int) -> int:
    end = time.monotonic() + RUN_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"a rank was still there after {RUN_SECONDS:g} s")


def losses(folder: Path) -> dict[int, float]:
    """The last loss of every step."""
    return dict(map(json.loads, (folder / "losses.jsonl").read_text().splitlines()))


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("rank*.log")))


def load_everything() -> None:
    """Imports before the forks; no thread and no process group may exist then."""
    import deepspeed  # noqa: F401
    import support.engine_ranks  # noqa: F401

    import deepspeed_pulse.engine.engine  # noqa: F401


def die_at_named_points(case: dict[str, Any]) -> None:
    """A rank dies at each of ``case["points"]``, of :data:`POINTS`."""
    load_everything()
    base = Path(case["folder"])
    assert run(base / "undisturbed") == [0] * RANKS, logs(base / "undisturbed")
    expected = losses(base / "undisturbed")
    for number, point in enumerate(case["points"]):
        place = base / point.replace(" ", "_")
        mine = 0 if "rename" in point else number % RANKS
        statuses = run(place, lambda rank, point=point, mine=mine: strike(point, rank, mine))
        assert statuses[mine] == -signal.SIGKILL, f"{point}: {statuses}\n{logs(place)}"
        assert statuses[1 - mine] == 1, f"{point}: {statuses}\n{logs(place)}"
        assert run(place) == [0] * RANKS, f"after {point}: {logs(place)}"
        assert losses(place) == expected, f"{point}: {losses(place)} instead of {expected}"
    print("PASSED", flush=True)


def die_at_random_moments(case: dict[str, Any]) -> None:
    """Kill a random rank after a random while, again and again, until the run ends."""
    load_everything()
    base = Path(case["folder"])
    started = time.monotonic()
    assert run(base / "undisturbed") == [0] * RANKS
    length, expected = time.monotonic() - started, losses(base / "undisturbed")
    struck = 0
    for seed in range(case["seeds"]):
        source, place = random.Random(seed), base / str(seed)

        def kill(children: list[int], folder: Path, source: random.Random = source) -> None:
            time.sleep(source.uniform(0.2, 1.0) * length)
            os.kill(source.choice(children), signal.SIGKILL)

        statuses = run(place, watch=kill)
        struck += any(statuses)
        if any(statuses):
            assert all(status in (0, 1, -signal.SIGKILL) for status in statuses), statuses
            assert run(place) == [0] * RANKS, f"seed {seed}: {logs(place)}"
        assert losses(place) == expected, f"seed {seed}: {losses(place)} instead of {expected}"
    assert struck > case["seeds"] / 2, f"only {struck} of {case['seeds']} kills came before the end of their run"
    print("PASSED", struck, "of", case["seeds"], "kills came before the end of their run", flush=True)


def stop_politely(folder: str) -> None:
    """SIGTERM to one rank in the fourth step: both finish it, save and exit; the run goes on from there."""
    load_everything()
    base = Path(folder)
    assert run(base / "undisturbed") == [0] * RANKS

    def asked(rank: int) -> None:
        from deepspeed_pulse.runtime.rank import RankRuntime

        genuine = RankRuntime._backward

        def once(self: Any, *args: Any) -> None:
            if rank == 1 and ARMED[0]:
                ARMED[0] = False
                os.kill(os.getpid(), signal.SIGTERM)
            genuine(self, *args)

        RankRuntime._backward = once  # type: ignore[method-assign]

    place = base / "asked"
    statuses = run(place, asked)
    assert statuses == [143] * RANKS, f"{statuses}\n{logs(place)}"
    assert (place / "latest").read_text() == "global_step4"
    assert "SIGTERM after step 4: saved" in logs(place)
    assert run(place) == [0] * RANKS and losses(place) == losses(base / "undisturbed")
    print("PASSED", flush=True)
