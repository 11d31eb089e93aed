"""One weight in several layers trains as one, wherever its places lie."""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.launch import launch
from support.shared_models import MODELS, REFUSED, WIDTH, tables_apart
from support.shared_ranks import LOSSES, case_name
from support.versions import plain_microbatches

from deepspeed_pulse.engine.sharing import shared as sharing

from deepspeed_pulse.engine.sharing import shared as sharing

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
    """All under every plan."""
    return [case_name({"model": model, **plan}) for plan in PLANS for model in (*REFUSED, *LOSSES)]


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
