"""Saves that cannot be: one clear error on every rank, nothing changed on disk, and the next save is whole."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from support.damage_ranks import check_error, error_of, everything, report, same, told
from support.parity import share_groups
from support.resume_ranks import Job, engine_of, train

from deepspeed_pulse.engine.checkpoints import claim
from deepspeed_pulse.engine.checkpoints.claim import LOCK_FILE
from deepspeed_pulse.engine.checkpoints.digests import HashedFile
from deepspeed_pulse.engine.checkpoints.files import CheckpointFolder

Act = Callable[[Any, Path], Any]
"""Is given an engine and the folder that holds its good checkpoint."""


def rank() -> int:
    return torch.distributed.get_rank()


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if path.name != LOCK_FILE
    }


class Custom:
    """Can be pickled, and is not read again."""


def save(**arguments: Any) -> Act:
    return lambda engine, folder: engine.save_checkpoint(folder, **arguments)


def into(make: Callable[[Path], Any]) -> Act:
    return lambda engine, folder: engine.save_checkpoint(make(folder), "new")


def client(make: Callable[[], Any]) -> Act:
    return lambda engine, folder: engine.save_checkpoint(folder, "new", client_state=make())


def on_rank(which: int, good: Any, bad: Any) -> Any:
    return bad if rank() == which else good


# ------------------------------------------------------------------------------------- circumstances


@contextmanager
def standing(folder: Path, name: str, *, is_folder: bool = False) -> Iterator[None]:
    """Something in the way."""
    path = folder / name
    held = path.read_bytes() if path.is_file() else None
    torch.distributed.barrier()
    if rank() == 0:
        path.unlink(missing_ok=True)
        path.mkdir() if is_folder else path.write_text("mine")
    torch.distributed.barrier()
    try:
        yield
    finally:
        torch.distributed.barrier()
        if rank() == 0:
            path.rmdir() if is_folder else path.unlink()
            if held is not None:
                path.write_bytes(held)
        torch.distributed.barrier()


@contextmanager
def files_up_to(number: int, which: int) -> Iterator[None]:
    """Files of one rank grow no larger: a quota, as the kernel enforces one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == which:
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def onto_a_full_device(which: int) -> Iterator[None]:
    """The files of one rank go where the kernel has no room left."""
    with ExitStack() as stack:
        if rank() == which:
            genuine = HashedFile.__init__
            stack.enter_context(
                patch.object(HashedFile, "__init__", lambda self, path: genuine(self, Path("/dev/full")))
            )
        yield


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """All but some kilobytes of a small disk are taken."""
    ballast = folder / "ballast"
    if rank() == 0:
        room = os.statvfs(folder)
        with ballast.open("wb") as file:
            file.write(b"x" * (room.f_bavail * room.f_frsize - 24_000))
    torch.distributed.barrier()
    try:
        yield
    finally:
        torch.distributed.barrier()
        if rank() == 0:
            ballast.unlink()
        torch.distributed.barrier()


def within(circumstance: Callable[[Path], Any], act: Act) -> Act:
    def run(engine: Any, folder: Path) -> None:
        with circumstance(folder):
            act(engine, folder)

    return run


def patched(which: int, target: Callable[[Any], Any], name: str, value: Any, act: Act) -> Act:
    """``act`` while something of one rank's is replaced."""

    def run(engine: Any, folder: Path) -> None:
        with ExitStack() as stack:
            if rank() == which:
                stack.enter_context(patch.object(target(engine), name, value))
            act(engine, folder)

    return run


def fails(*_: Any, **__: Any) -> None:
    raise KeyError("no such schedule")


def without_room(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device", "latest")


NEW = save(tag="new")

TAGS = ("", " ", ".", "..", "a/b", "/tmp/absolute", "../up", "latest", "new.writing", "pulse_run.json", "a\nb", "a\0b")

SAVES: dict[str, tuple[Act, str]] = {
    **{f"tag {tag!r}": (save(tag=tag), f"tag: expected the name of one folder, found {tag!r}") for tag in TAGS},
    "a tag that is too long": (save(tag="x" * 300), "the checkpoint cannot be written: File name too long"),
    "another tag on rank 1": (
        lambda engine, folder: engine.save_checkpoint(folder, on_rank(1, "new", "other")),
        "tag 'other', no ema=; every rank calls it, with the same",
    ),
    "another folder on rank 1": (
        lambda engine, folder: engine.save_checkpoint(on_rank(1, folder, folder / "other"), "new"),
        "other', tag 'new', no ema=; every rank calls it, with the same",
    ),
    **{
        f"a limit of {limit!r}": (
            save(tag="new", checkpoints_total_limit=limit),
            f"checkpoints_total_limit: expected a number of checkpoints >= 1 or None, found {limit!r}",
        )
        for limit in (0, -1, True, "2", 1.5)
    },
    "no folder": (into(lambda _: None), "save_dir: expected a folder, found None"),
    "an empty folder name": (into(lambda _: ""), "save_dir: expected a folder, found ''"),
    "a number for a folder": (into(lambda _: 3), "save_dir: expected a folder, found 3"),
    "a file for the folder": (into(lambda folder: folder / "latest"), "latest: the checkpoint cannot be written"),
    "a folder below a file": (into(lambda folder: folder / "latest" / "a"), "cannot be written: Not a directory"),
    "a folder where none can be": (into(lambda _: "/proc/pulse/a"), "the checkpoint cannot be written"),
    "a file for the checkpoint": (within(lambda f: standing(f, "new"), NEW), "new: expected a folder or nothing"),
    "a file for the unfinished checkpoint": (
        within(lambda f: standing(f, "new.writing"), NEW),
        "new.writing: expected a folder or nothing",
    ),
    "a file for the replaced checkpoint": (
        within(lambda f: standing(f, "new.replaced"), NEW),
        "new.replaced: expected a folder or nothing",
    ),
    "a folder for latest": (
        within(lambda f: standing(f, "latest", is_folder=True), NEW),
        "latest: expected a file or nothing, found a folder",
    ),
    "client state: a list": (client(lambda: ["a"]), "client_state: expected a dict, found list"),
    "client state: a lambda": (client(lambda: {"f": lambda: 0}), "client_state['f']: cannot be saved"),
    "client state: a generator": (client(lambda: {"g": (i for i in ())}), "client_state['g']: cannot be saved"),
    "client state: a class of the user's": (
        client(lambda: {"c": Custom()}),
        "client_state['c']: cannot be read safely",
    ),
    "client state: a number of numpy's": (client(lambda: {"n": numpy.float64(1)}), "client_state['n']: cannot be read"),
    "client state: an odd key": (client(lambda: {Custom: 1}), "cannot be read safely"),
    "client state: on rank 1 only": (
        client(lambda: on_rank(1, {}, {"c": Custom()})),
        "client_state['c']: cannot be read safely",
    ),
    **{
        f"client state: {key}": (client(lambda key=key: {key: 1}), f"{key!r}: DeepSpeed saves its own state under")
        for key in (
            "optimizer",
            "module",
            "ds_config",
            "lr_scheduler",
            "global_steps",
            "checkpoint_parallel_dimensions",
        )
    },
    "a scheduler that cannot be saved": (
        patched(1, lambda e: e.lr_scheduler, "state_dict", lambda: {"f": lambda: 0}, NEW),
        "mp_rank_01_model_states.pt: cannot be saved",
    ),
    "a scheduler that could not be loaded": (
        patched(1, lambda e: e.lr_scheduler, "state_dict", lambda: {"f": Custom()}, NEW),
        "mp_rank_01_model_states.pt: cannot be read safely",
    ),
    "a scheduler that raises on rank 1": (
        patched(1, lambda e: e.lr_scheduler, "state_dict", fails, NEW),
        "rank 1: saving",
    ),
    "a layer that raises on rank 0": (
        patched(0, lambda e: e.module.forward_funcs[0], "state_dict", fails, NEW),
        "rank 0: saving",
    ),
    **{
        f"a quota on rank {which}": (
            within(lambda f, which=which: files_up_to(1000, which), NEW),
            "the checkpoint cannot be written: File too large",
        )
        for which in (0, 1)
    },
    **{
        f"a full device on rank {which}": (
            within(lambda f, which=which: onto_a_full_device(which), NEW),
            "the checkpoint cannot be written: No space left on device",
        )
        for which in (0, 1)
    },
    "no room for latest": (
        patched(0, lambda e: CheckpointFolder, "commit", without_room, NEW),
        "the checkpoint cannot be written: No space left on device",
    ),
    "over the good one, a full device on rank 1": (
        within(lambda f: onto_a_full_device(1), save(tag="good")),
        "the checkpoint cannot be written: No space left on device",
    ),
}

LOADS: dict[str, tuple[Act, str]] = {
    **{
        f"load tag {tag!r}": (lambda engine, folder, tag=tag: engine.load_checkpoint(folder, tag), "tag: expected the")
        for tag in ("", ".", "..", "a/b", "latest")
    },
    "load another tag on rank 1": (
        lambda engine, folder: engine.load_checkpoint(folder, on_rank(1, "good", "other")),
        "load_checkpoint: rank 0 was given tag 'good', rank 1 tag 'other'; every rank calls it, with the same",
    ),
    "load from a file": (lambda engine, folder: engine.load_checkpoint(folder / "latest"), "found a file"),
    "load by a function": (
        lambda engine, folder: engine.load_checkpoint(folder, custom_load_fn=print),
        "custom_load_fn: expected None",
    ),
}


# ------------------------------------------------------------------------------------- what ranks run


def refused_saves(case: dict[str, Any]) -> None:
    """Each case of :data:`SAVES` and :data:`LOADS`, with pulse and without, then a save that is whole."""
    share_groups()
    import deepspeed

    deepspeed.init_distributed()
    for label, options in case["jobs"]:
        folder = Path(case["folder"]) / label
        engine = engine_of(Job(**options))
        train(engine, range(1))
        engine.save_checkpoint(folder, "good", client_state={"note": 7})
        cases = SAVES | LOADS
        if case["small disk"] is not None:
            folder = Path(case["small disk"]) / label
            engine.save_checkpoint(folder, "good", client_state={"note": 7})
            cases = cases | {"a full disk": (within(full, NEW), "the checkpoint cannot be written: No space left")}
        for name, (act, expected) in cases.items():
            report(f"{label}: {name}", refused(engine, folder, act, expected))
        for name, act in PARTIAL.items():
            report(f"{label}: {name}", partial(engine, folder, act))
        engine.save_checkpoint(folder, "after", client_state={"note": 8})
        before = everything(engine)
        train(engine, range(1, 2))
        _, state = engine.load_checkpoint(folder)
        assert state == {"note": 8} and same(everything(engine), before)
        report(f"{label}: glob characters", saved_and_resumed(engine, folder / "a[b]*?[!c]" / "**"))
        engine.destroy()


def refused(engine: Any, folder: Path, act: Act, expected: str) -> str:
    torch.distributed.barrier()
    files, state = files_in(folder), everything(engine)
    torch.distributed.barrier()
    problem = check_error(told(error_of(lambda: act(engine, folder))), expected)
    torch.distributed.barrier()
    if files_in(folder) != files:
        problem += f"; files changed: {sorted(files_in(folder).keys() ^ files.keys())}"
    if not same(everything(engine), state):
        problem += "; state changed"
    torch.distributed.barrier()
    return problem


def saved_and_resumed(engine: Any, folder: Path) -> str:
    engine.save_checkpoint(folder, "[tag]")
    before = everything(engine)
    train(engine, range(1))
    engine.load_checkpoint(folder)
    return "" if same(everything(engine), before) else "another state was loaded"


PARTIAL: dict[str, Act] = {
    "loading breaks off in a layer of rank 1": patched(
        1, lambda e: e.module.forward_funcs[-1], "load_state_dict", fails, lambda e, f: e.load_checkpoint(f, "good")
    ),
    "loading breaks off in the scheduler of rank 0": patched(
        0, lambda e: e.lr_scheduler, "load_state_dict", fails, lambda e, f: e.load_checkpoint(f, "good")
    ),
    "loading breaks off before the layers of rank 1": patched(
        1, lambda _: DeepSpeedEngine, "_load_checkpoint", fails, lambda e, f: e.load_checkpoint(f, "good")
    ),
}


def partial(engine: Any, folder: Path, act: Act) -> str:
    """All raise; nothing trains or saves until a whole checkpoint is loaded."""
    found = told(error_of(lambda: act(engine, folder)))
    problem = check_error(found, "KeyError: 'no such schedule'")
    for name, use in {
        "train_batch": lambda: train(engine, range(1)),
        "save_checkpoint": lambda: engine.save_checkpoint(folder, "half"),
        "what saves averages and models": lambda: engine.module.ranks.together(lambda: None, "save_pretrained()"),
    }.items():
        refusals = told(error_of(use))
        if any(kind != "RunError" or "load a whole checkpoint first" not in text for kind, text in refusals):
            problem += f"; {name}: {refusals}"
    engine.load_checkpoint(folder, "good")
    train(engine, range(1))
    engine.load_checkpoint(folder, "good")
    return problem


# ------------------------------------------------------------------------------------------ two jobs


def two_jobs(case: dict[str, Any]) -> None:
    """Ranks 0 and 1 are one job, 2 and 3 another, which saves into the same folder until the first has ended.

    The first is told nothing and overwrites its own checkpoint; the second is refused, and may save afterwards.
    """
    me = int(os.environ["RANK"])
    second = me >= 2
    os.environ.update(RANK=str(me % 2), LOCAL_RANK=str(me % 2), WORLD_SIZE="2", LOCAL_SIZE="2")
    os.environ["MASTER_PORT"] = str(case["ports"][second])
    import deepspeed

    deepspeed.init_distributed()
    folder, signs = Path(case["folder"]) / "shared", Path(case["folder"])
    engine = engine_of(Job(ranks=2))
    if not second:
        engine.save_checkpoint(folder, "step")
        tell(signs / "saved")
        wait_for(signs / "refused")
        engine.save_checkpoint(folder, "step")
        assert (folder / "latest").read_text() == "step"
        engine.load_checkpoint(folder)
        torch.distributed.barrier()
        if rank() == 0:
            (signs / "first.pid").write_text(str(os.getpid()))
        return
    wait_for(signs / "saved")
    files = files_in(folder)
    with patch.object(claim, "WAIT_SECONDS", 0.0):
        found = told(error_of(lambda: engine.save_checkpoint(folder, "step")))
    problem = check_error(found, f"another job saves into this folder (host {socket.gethostname()}, process ")
    assert not problem and files_in(folder) == files, problem
    engine.load_checkpoint(folder)  # reading is no business of the other job
    tell(signs / "refused")
    wait_for(signs / "first.pid")
    engine.save_checkpoint(folder, "step")  # waits until the first is gone
    engine.load_checkpoint(folder)


def tell(sign: Path) -> None:
    torch.distributed.barrier()
    if rank() == 0:
        sign.touch()


def wait_for(sign: Path) -> None:
    while not sign.exists():
        time.sleep(0.05)
    torch.distributed.barrier()
