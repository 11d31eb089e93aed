"""Checkpoints damaged in every way: one agreed error on all ranks, nothing changed, the last good one loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.parity import share_groups
from support.resume_ranks import Job, engine_of, train

from deepspeed_pulse.engine.checkpoints.digests import SUMS_FILE, digest_of, write_sums
from deepspeed_pulse.engine.checkpoints.record import RECORD_FILE
from deepspeed_pulse.errors import PulseError

Damage = Callable[[Path], None]
"""Is given a checkpoint's folder; what it does on rank 0 happens once."""

EXECUTED = "executed"
"""File that a pickle makes when it is executed."""


class Malicious:
    """Runs code where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.mark = str(folder / EXECUTED)

    def __reduce__(self) -> Any:
        return open, (self.mark, "w")


def resummed(damage: Damage) -> Damage:
    """The same, with digests that fit: as a foreign or careless hand would leave it."""

    def act(where: Path) -> None:
        damage(where)
        write_sums(where, {p.name: digest_of(p) for p in where.iterdir() if p.is_file() and p.name != SUMS_FILE})

    return act


def unsummed(damage: Damage) -> Damage:
    """The same, in a checkpoint of the format that had no digests."""

    def act(where: Path) -> None:
        (where / SUMS_FILE).unlink()
        record = json.loads((where / RECORD_FILE).read_text())
        (where / RECORD_FILE).write_text(json.dumps({**record, "format": "pulse-checkpoint/1"}))
        damage(where)

    return act


# ---------------------------------------------------------------------------- ways to damage a file


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_last(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(at: float) -> Damage:
    def act(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= 16
        path.write_bytes(content)

    return act


def flip_number(path: Path) -> None:
    """One bit of one weight or average, where nothing else notices."""
    content = bytearray(path.read_bytes())
    state = torch.load(path, weights_only=False)
    number = next(t for t in tensors_in(state) if t.is_floating_point() and t.numel() > 2)
    raw = number.reshape(-1).view(torch.uint8).numpy().tobytes()[:8]
    content[content.index(raw)] ^= 1
    path.write_bytes(content)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in inside for tensor in tensors_in(one)]


def text(path: Path) -> None:
    path.write_text("surprise")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def malicious(path: Path) -> None:
    torch.save({"module": Malicious(path.parent.parent)}, path)


def malicious_legacy(path: Path) -> None:
    torch.save({"module": Malicious(path.parent.parent)}, path, _use_new_zipfile_serialization=False)


def changed(change: Callable[[Any], Any]) -> Damage:
    """The same torch file with other content."""

    def act(path: Path) -> None:
        torch.save(change(torch.load(path, weights_only=False)), path)

    return act


def without(key: str) -> Damage:
    return changed(lambda state: {k: v for k, v in state.items() if k != key})


def on(name: str, damage: Damage) -> Damage:
    return lambda where: damage(where / name)


def swap(first: str, second: str) -> Damage:
    def act(where: Path) -> None:
        (where / first).rename(where / "held")
        (where / second).rename(where / first)
        (where / "held").rename(where / second)

    return act


LAYER, LAST, FIRST_RANK, SECOND_RANK = (
    "layer_02-model_states.pt",
    "layer_09-model_states.pt",
    "mp_rank_00_model_states.pt",
    "mp_rank_01_model_states.pt",
)

EVERY_WAY: dict[str, Damage] = {
    "missing": remove,
    "empty": empty,
    "cut in half": cut,
    "without its last byte": cut_last,
    "a byte longer": extend,
    "a flipped bit at the start": flip(0.01),
    "a flipped bit at the end": flip(0.99),
    "a text": text,
    "a folder": folder,
    "a malicious pickle": malicious,
    "an old malicious pickle": malicious_legacy,
}


def cases_of(saved: dict[str, Any], optimizer_file: str) -> dict[str, tuple[Damage, str]]:
    """By name: what is damaged of a job's checkpoint, and what the error must say."""
    torch_files = dict.fromkeys([LAYER, FIRST_RANK, SECOND_RANK, optimizer_file])
    found = {f"{name}: {how}": (on(name, way), name) for name in torch_files for how, way in EVERY_WAY.items()}
    found |= {f"{name}: a flipped number": (on(name, flip_number), name) for name in (LAYER, LAST, optimizer_file)}
    found |= {
        f"{RECORD_FILE}: {how}": (on(RECORD_FILE, EVERY_WAY[how]), RECORD_FILE)
        for how in ("missing", "empty", "cut in half", "a flipped bit at the end", "a text", "a folder")
    }
    found[f"{RECORD_FILE}: a malicious pickle"] = on(RECORD_FILE, malicious), RECORD_FILE
    found |= {
        f"{SUMS_FILE}: {how}": (on(SUMS_FILE, EVERY_WAY[how]), "" if "flipped" in how else SUMS_FILE)
        for how in ("missing", "empty", "cut in half", "a flipped bit at the start", "a malicious pickle", "a folder")
    }
    for how in ("missing", "a flipped bit at the end", "a malicious pickle") if not saved.get("off") else ():
        found[f"pulse_plan.json: {how}"] = on("pulse_plan.json", EVERY_WAY[how]), "pulse_plan.json"
    for name in torch_files:
        for how in ("a malicious pickle", "an old malicious pickle", "a text", "empty"):
            found[f"{name}: {how}, digest fits"] = resummed(on(name, EVERY_WAY[how])), name
        for how in ("missing", "cut in half", "empty"):
            found[f"{name}: {how}, no digests"] = unsummed(on(name, EVERY_WAY[how])), name[:7]
    narrow = changed(lambda state: {k: v[:1] for k, v in state.items()})
    found |= {
        "two layers swapped": (swap(LAYER, LAST), "is damaged"),
        "two layers swapped, digests fit": (resummed(swap(LAYER, LAST)), "does not fit its layer"),
        "a layer without a weight": (resummed(on(LAYER, without("inner.weight"))), "missing inner.weight"),
        "a layer with a weight more": (resummed(on(LAYER, changed(lambda s: {**s, "x": 1}))), "unknown x"),
        "a layer of another shape": (resummed(on(LAYER, narrow)), "inner.weight: expected shape [8, 8], found [1, 8]"),
        "a layer file that holds a list": (resummed(on(LAYER, changed(list))), "expected the state of a layer"),
        "a file of another layer's beside": (beside, "expected one file for each layer"),
        "a rank's file without its step": (resummed(on(FIRST_RANK, without("global_steps"))), "expected the state of"),
        "a rank's file of a larger job": (
            resummed(on(FIRST_RANK, changed(lambda s: {**s, "mp_world_size": 4}))),
            "expected 4 files mp_rank_*_model_states.pt, found 2",
        ),
        "an empty folder": (clear, "expected a checkpoint, found no mp_rank_"),
        "no folder": (shutil.rmtree, "expected a checkpoint"),
        "a file for the folder": (file_instead, "expected a checkpoint"),
    }
    return found


def beside(where: Path) -> None:
    shutil.copy(where / LAYER, where / LAYER.replace("02-", "02-model_01-"))


def clear(where: Path) -> None:
    for path in where.iterdir():
        path.unlink()
    (where / "note").write_text("")


def file_instead(where: Path) -> None:
    shutil.rmtree(where)
    where.write_text("")


LATEST: dict[str, Damage] = {
    "empty": empty,
    "a path": lambda path: path.write_text("../elsewhere"),
    "the folder itself": lambda path: path.write_text("."),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a malicious pickle": malicious,
    "a folder": folder,
    "a tag that is not there": lambda path: path.write_text("step99"),
}


# ------------------------------------------------------------------------------------- what ranks run


def everything(engine: Any) -> list[torch.Tensor]:
    """Copies of all numbers that training goes on from."""
    optimizer = engine.optimizer
    found = [*engine.module.parameters(), *engine.module.buffers()]
    for names in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        found += getattr(optimizer, names, [])
    found += tensors_in(list(engine.basic_optimizer.state.values()))
    counts = [engine.global_steps, engine.lr_scheduler.last_epoch, *(g["lr"] for g in optimizer.param_groups)]
    return [t.detach().clone() for t in found] + [torch.tensor(counts)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def told(item: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, item)
    return found


def error_of(act: Callable[[], Any]) -> tuple[str, str]:
    """Name and text of what ``act`` raises."""
    try:
        act()
    except Exception as problem:
        return type(problem).__name__ + ("" if isinstance(problem, PulseError) else " (no PulseError)"), str(problem)
    return "nothing", ""


def check_error(found: list[tuple[str, str]], expected: str) -> str:
    """Empty, or what is wrong with the errors of all ranks."""
    if len(set(found)) > 1:
        return f"ranks disagree: {found}"
    kind, message = found[0]
    if kind not in ("FileError", "ConfigError", "PlanError") or expected not in message or "\n" in message:
        return f"expected one line with {expected!r}, found {kind}: {message}"
    return ""


def report(name: str, problem: str) -> None:
    """A case's own line, which its test looks for."""
    wrong = next((one for one in told(problem) if one), "")
    print(json.dumps({"case": name, "problem": wrong}), flush=True)


def results(output: str) -> dict[str, str]:
    """Case to what was wrong with it."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line["problem"] for line in lines}


def damaged_checkpoints(case: dict[str, Any]) -> None:
    """Every damage under every job: the checkpoint is copied, damaged and loaded; then the good one is."""
    share_groups()
    import deepspeed

    deepspeed.init_distributed()
    base = Path(case["folder"])
    for label, options, optimizer_file in case["jobs"]:
        place = base / label
        engine = engine_of(Job(**options["saved"]))
        train(engine, range(1))
        engine.save_checkpoint(place, "good")
        train(engine, range(1, 2))
        engine.save_checkpoint(place, "newer")
        engine.destroy()
        engine = engine_of(Job(**options["loaded"]))
        engine.load_checkpoint(place, "good")
        good = everything(engine)
        for name, (damage, expected) in cases_of(options["saved"], optimizer_file).items():
            problem = load_damaged(engine, place, damage, expected, good)
            report(f"{label}: {name}", problem)
        for name, damage in LATEST.items():
            report(f"{label}: latest: {name}", load_without_latest(engine, place, damage, good))
        assert not list(place.rglob(EXECUTED))
        engine.destroy()


def load_damaged(engine: Any, place: Path, damage: Damage, expected: str, good: list[torch.Tensor]) -> str:
    tried = place / "tried"
    if torch.distributed.get_rank() == 0:
        shutil.copytree(place / "newer", tried)
        damage(tried)
    torch.distributed.barrier()
    found = told(error_of(lambda: engine.load_checkpoint(place, "tried")))
    problem = check_error(found, expected)
    if not same(everything(engine), good):
        problem += "; state was changed"
    if (place / EXECUTED).exists():
        problem += "; a pickle was executed"
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(tried, ignore_errors=True)
        tried.unlink(missing_ok=True)
    torch.distributed.barrier()
    return problem or last_good(engine, place, good)


def load_without_latest(engine: Any, place: Path, damage: Damage, good: list[torch.Tensor]) -> str:
    latest = place / "latest"
    if torch.distributed.get_rank() == 0:
        damage(latest)
    torch.distributed.barrier()
    problem = check_error(told(error_of(lambda: engine.load_checkpoint(place))), str(place))
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(latest, ignore_errors=True)
        latest.write_text("newer")
    torch.distributed.barrier()
    return problem or last_good(engine, place, good)


def last_good(engine: Any, place: Path, good: list[torch.Tensor]) -> str:
    engine.load_checkpoint(place, "good")
    return "" if same(everything(engine), good) else "the good checkpoint loads to something else"
