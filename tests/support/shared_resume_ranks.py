"""What ranks run in the tests of resuming with shared weights; a module apart, for it loads diffusers."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from support.parity import share_groups
from support.precision_ranks import cast
from support.shared_models import MODELS, batch
from support.shared_ranks import (
    TOLERANCES,
    case_name,
    check_copies,
    dtype_of,
    engine_of,
    joined,
    places_of,
    weights_of,
)

from deepspeed_pulse.models import EMA

BEFORE, AFTER = 2, 2
GLOBAL_MICROBATCHES = 4


def resumes(argument: dict[str, Any]) -> None:
    """Each base is saved after two steps; every target goes on from there as the base does, its Adam state too."""
    torch.set_num_threads(1)
    share_groups()
    for number, (base, targets) in enumerate(argument["cases"]):
        folder = Path(argument["folder"], str(number))
        expected = saved(base, folder)
        for target in targets:
            name, problem = f"{case_name(base)} -> {case_name(target)}", None
            try:
                check_resumed({**base, **target}, folder, expected)
            except AssertionError as found:
                problem = str(found) or "assertion failed"
            print("CASE", json.dumps([name, problem]), flush=True)


def resumable(case: dict[str, Any], seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed + int(os.environ["RANK"]) * case["P"] // int(os.environ["WORLD_SIZE"]))
    microbatches = GLOBAL_MICROBATCHES * case["P"] // int(os.environ["WORLD_SIZE"])
    engine = engine_of({**case, "optimizer": "adam", "M": microbatches}, MODELS[case["model"]]())
    return engine, EMA(engine, decay=0.5)


def train(engine: Any, ema: Any, steps: range) -> list[float]:
    losses = []
    share = engine.gradient_accumulation_steps()
    for step in steps:
        first = engine.grid.data_parallel_id * share
        data = (cast(batch(step, first + m, 0), dtype_of(engine)) for m in itertools.count())
        losses.append(float(engine.train_batch(data_iter=data).detach()))
        ema.step()
    return losses


def saved(base: dict[str, Any], folder: Path) -> dict[str, Any]:
    engine, ema = resumable(base, 100)
    train(engine, ema, range(BEFORE))
    engine.save_checkpoint(folder)
    ema.save(folder / "ema")
    then = {"weights": joined(weights_of(engine)), "state": states_of(engine), "averages": averages_of(ema)}
    losses = train(engine, ema, range(BEFORE, BEFORE + AFTER))
    found = {**then, "losses": losses, "last": joined(weights_of(engine))}
    engine.destroy()
    return found


def states_of(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Adam's moments of every parameter, by name, from all ranks."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # upstream does it in the next step
    mine: dict[str, dict[str, torch.Tensor]] = {}
    for p, name in engine.param_names.items():
        if p.requires_grad:
            plain = getattr(engine.optimizer, "state", {}).get(p) or {}
            moments = {
                key: plain[key] if key in plain else safe_get_full_optimizer_state(p, key)
                for key in ("exp_avg", "exp_avg_sq")
            }
            mine[name] = {key: value.detach().float().reshape(-1).clone() for key, value in moments.items()}
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, mine)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for row in rows:
        for name, state in row.items():
            first = found.setdefault(name, state)
            assert all(torch.equal(first[key], state[key]) for key in state), f"copies of the state of {name} differ"
    return found


def averages_of(ema: Any) -> dict[str, torch.Tensor]:
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, {name: p.detach().float().clone() for name, p in ema.averages().items()})
    return {name: average for row in rows for name, average in row.items()}


def check_resumed(case: dict[str, Any], folder: Path, expected: dict[str, Any]) -> None:
    engine, ema = resumable(case, 900)
    engine.load_checkpoint(folder)
    ema.load(folder / "ema")
    weights, state, averages = joined(weights_of(engine)), states_of(engine), averages_of(ema)
    losses = train(engine, ema, range(BEFORE, BEFORE + AFTER))
    last = joined(weights_of(engine))
    engine.destroy()
    places = places_of(MODELS[case["model"]]())
    check_copies(weights, places)
    check_copies(last, places)
    assert weights.keys() == expected["weights"].keys() and state.keys() == expected["state"].keys()
    assert all(torch.equal(value, expected["weights"][key]) for key, value in weights.items()), "weights"
    for name, moments in state.items():
        for key, value in moments.items():
            assert torch.equal(value, expected["state"][name][key]), f"{key} of {name}"
    assert averages.keys() == expected["averages"].keys()
    assert all(torch.equal(value, expected["averages"][key]) for key, value in averages.items()), "averages"
    tolerance = TOLERANCES[case.get("precision", "fp32")]
    for found, wanted in zip(losses, expected["losses"], strict=True):
        assert abs(found - wanted) <= tolerance * wanted, f"losses {losses} instead of {expected['losses']}"
