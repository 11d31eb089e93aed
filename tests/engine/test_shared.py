"""One weight in several layers trains as one, wherever its places lie."""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.launch import launch
from support.shared_models import MODELS, WIDTH, one_normalises, tables_apart
from support.shared_ranks import case_name, refused_under
from support.versions import plain_microbatches

from deepspeed_pulse import TiedLayerSpec
from deepspeed_pulse.engine.sharing import shared as sharing
from deepspeed_pulse.engine.sharing.unseen import check_changed_weights
from deepspeed_pulse.engine.specs import graph_of
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.effects import Effects

Case = dict[str, Any]

LINEAR = {"placement": "linear", "clip": 0.1}


def cases(world: int) -> list[Case]:
    """Every model under a plan that parts its places, and some more of each kind; the whole product is `make soak`."""
    found = [{"model": model, "P": world, **LINEAR} for model in MODELS]
    if world == 3:
        return [*found, {"model": "everywhere", "P": 1, "clip": 0.1}]
    kinds: tuple[Case, ...] = ({"zero": 1}, {"precision": "bf16"}, {})
    found += [{"model": model, "P": 2, **LINEAR, **kind} for model, kind in zip(MODELS, itertools.cycle(kinds))]
    return [
        *found,
        {"model": "everywhere", "P": 4},
        {"model": "everywhere", "P": 4, "pulse": "off", "precision": "bf16", "clip": 0.1},
        {"model": "unused", "P": 2, **LINEAR, "precision": "bf16"},
        {"model": "unused", "P": 4, "pulse": "off", "clip": 0.1},
        {"model": "with names", "P": 2, "W": 2, "clip": 0.1},
        {"model": "with a tied spec", "P": 2, "pulse": "off", "clip": 0.1},
        {"model": "submodule", "P": 2, **LINEAR, "interval": 1},
        {"model": "three places", "P": 4, "pulse": "none", "M": plain_microbatches()},
        {"model": "three places", "P": 4, **LINEAR, "precision": "fp16"},
    ]


@functools.cache
def problems(world: int) -> dict[str, list[str]]:
    """What the ranks of one launch say of each case."""
    return told("shared_ranks:run_cases", world, cases(world))


def told(target: str, world: int, asked: Any) -> dict[str, list[str]]:
    """Case to what ranks say is wrong with it; a case that they did not come to has the end of a failed rank's output.

    It is kept for all tests of a launch, so it never raises.
    """
    found: dict[str, list[str]] = {}
    failed: list[str] = []
    for status, output in launch(f"support.{target}", world, asked, timeout=3000, check=False):
        failed += [output[-3000:]] if status else []
        for line in output.splitlines():
            if line.startswith("CASE"):
                name, problem = json.loads(line.removeprefix("CASE"))
                found.setdefault(name, []).extend([problem] if problem else [])
    return defaultdict(lambda: failed or ["no rank came to it"], found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "name"), [(world, case_name(case)) for world in (3, 4) for case in cases(world)])
def test_a_shared_weight_trains_as_one(world: int, name: str) -> None:
    assert problems(world)[name] == []


PLANS: list[Case] = [{"P": 3, "placement": "linear"}, {"P": 1}, {"P": 3, "pulse": "off"}]


@functools.cache
def refusals() -> dict[str, list[str]]:
    return told("shared_ranks:refuses", 3, PLANS)


def refused() -> list[str]:
    return [case_name({"model": model, **plan}) for plan in PLANS for model in refused_under(plan)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", refused())
def test_what_cannot_be_one_weight_is_refused(name: str) -> None:
    assert refusals()[name] == []


def test_a_shared_buffer_is_told_to_this_ranks_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device each of them has a tensor of its own, and what another rank's module has stays on the host."""
    layers = tables_apart()
    found = sharing.SharedWeights(layers)
    (holders,) = (one.layers for one in found.buffers)
    tie = sharing.Tie(ranks=(0, 1), group=None)
    found._here, found._ties = frozenset({5, 6}), {holders: tie}
    before = layers[1].numbers
    for index in (5, 6):
        layers[index].numbers = before.clone()
    told: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, src: int, group: Any) -> None:
        told.append(tensor)
        tensor.copy_(torch.full((WIDTH,), 3.0).view(torch.uint8))

    monkeypatch.setattr(sharing.dist, "broadcast", broadcast)
    found.synchronize()
    assert len(told) == 1
    assert all(torch.equal(layers[index].numbers, torch.full((WIDTH,), 3.0)) for index in (5, 6))
    assert layers[1].numbers is before and not torch.equal(before, layers[5].numbers)


SETTLES, GOES_ON = Effects(weights=("inner.weight",)), Effects(unsettled=("inner.weight",))
COUNTS = Effects(unsettled_frozen=("inner.weight",))

CHANGED: list[tuple[str, dict[int, Effects], list[int], list[int], bool]] = [
    ("nobody", {}, [0, 0, 1, 1], [0, 1], True),
    ("the first alone, on two ranks", {1: SETTLES}, [0, 0, 1, 1], [0, 1], False),
    ("the second alone, on two ranks", {6: SETTLES}, [0, 0, 1, 1], [0, 1], False),
    ("both", {1: SETTLES, 6: SETTLES}, [0, 0, 1, 1], [0, 1], True),
    ("both, and it goes on", {1: GOES_ON, 6: GOES_ON}, [0, 0, 1, 1], [0, 1], False),
    ("both, and it trains no more", {1: COUNTS, 6: COUNTS}, [0, 0, 1, 1], [0, 1], False),
    ("the first alone, on one rank", {1: SETTLES}, [0, 0, 1, 1], [0, 0], True),
    ("the second alone, on one rank", {6: SETTLES}, [0, 0, 1, 1], [0, 0], False),
    ("the second alone, in one stage", {6: SETTLES}, [0, 0, 0, 0], [0], True),
]
"""Who changes a weight that layers 1 and 6 share; the stage of each two layers, the rank of each stage,
and whether that is one weight."""


@pytest.mark.parametrize(("who", "effects", "stages", "ranks", "fits"), CHANGED, ids=[one[0] for one in CHANGED])
@pytest.mark.parametrize("tied", [False, True])
def test_a_shared_weight_that_a_layer_changes(
    who: str, effects: dict[int, Effects], stages: list[int], ranks: list[int], fits: bool, tied: bool
) -> None:
    layers = one_normalises()
    if tied:
        layers[1], layers[6] = (TiedLayerSpec("block", torch.nn.Linear, 4, 4) for _ in range(2))
    module = SimpleNamespace(
        shared=sharing.SharedWeights(layers),
        graph=graph_of(layers),
        plan=SimpleNamespace(stage_of=lambda index: stages[index // 2]),
        stage_owner=lambda index: ranks[stages[index // 2]],
        _layer_specs=layers,
    )
    all_effects = [effects.get(index, Effects()) for index in range(len(layers))]
    if fits:
        check_changed_weights(module, all_effects)
        return
    with pytest.raises(GraphError, match=r"share a weight, which .* changes in forward \(inner.weight\)"):
        check_changed_weights(module, all_effects)


LINEAR4, WAVE4, LINEAR2, WAVE2, OFF4 = (
    {"P": 4, "placement": "linear"},
    {"P": 4, "placement": "wave"},
    {"P": 2, "placement": "linear"},
    {"P": 2, "placement": "wave"},
    {"P": 4, "pulse": "off"},
)
BF16 = {"precision": "bf16", "zero": 1}
RESUMES: list[tuple[Case, list[Case]]] = [
    ({"model": "three places", **LINEAR4}, [LINEAR4, WAVE4, {**LINEAR2, "zero": 1}, OFF4, {**WAVE2, "zero": 1}]),
    ({"model": "three places", **WAVE2, "zero": 1}, [LINEAR4, {**LINEAR2, "zero": 1}]),
    ({"model": "everywhere", **LINEAR2, **BF16}, [{**LINEAR4, **BF16}, WAVE4 | BF16]),
    ({"model": "frozen", **WAVE4}, [LINEAR2, OFF4]),
]


@functools.cache
def resumed() -> dict[str, list[str]]:
    with TemporaryDirectory() as folder:
        return told("shared_resume_ranks:resumes", 4, {"folder": folder, "cases": RESUMES})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [f"{case_name(base)} -> {case_name(t)}" for base, targets in RESUMES for t in targets])
def test_a_shared_weight_resumes_under_any_plan(name: str) -> None:
    assert resumed()[name] == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shared_weights_whole_product(world: int) -> None:
    """Models x P x placement x ZeRO x precision x clipping x pulse."""
    places: list[Case] = [{}, {"placement": "linear"}, {"W": 2}, {"pulse": "off"}]
    ranks = [{"P": p} for p in range(1, world + 1) if world % p == 0]
    asked: list[Case] = []
    for model, p, place, precision, zero, clip in itertools.product(
        MODELS, ranks, places, ("fp32", "bf16", "fp16"), (0, 1), (0.0, 0.1)
    ):
        if 2 * p["P"] * place.get("W", 1) <= 8:
            asked.append({"model": model, **p, **place, "precision": precision, "zero": zero, "clip": clip})
    asked = [case for case in asked if not (case.get("pulse") and case["precision"] == "fp16" and not case["zero"])]
    found = told("shared_ranks:run_cases", world, asked)
    names = [case_name(case) for case in asked]
    assert not {name: found[name] for name in names if found[name]}
