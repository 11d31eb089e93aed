"""One weight in several layers trains as one, wherever its places lie."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
from support.launch import launch
from support.shared_models import MODELS, REFUSED
from support.shared_ranks import case_name

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
        {"model": "three places", "P": 4, "pulse": "none"},
        {"model": "three places", "P": 4, **LINEAR, "precision": "fp16"},
    ]


@functools.cache
def problems(world: int) -> dict[str, list[str]]:
    """What the ranks of one launch say of each case."""
    return told("run_cases", world, cases(world))


def told(target: str, world: int, asked: list[Case]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for _, output in launch(f"support.shared_ranks:{target}", world, asked, timeout=3000):
        for line in output.splitlines():
            if line.startswith("CASE"):
                name, problem = json.loads(line.removeprefix("CASE"))
                found.setdefault(name, []).extend([problem] if problem else [])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "name"), [(world, case_name(case)) for world in (3, 4) for case in cases(world)])
def test_a_shared_weight_trains_as_one(world: int, name: str) -> None:
    assert problems(world)[name] == []


PLANS: list[Case] = [{"P": 3, "placement": "linear"}, {"P": 1}, {"P": 3, "pulse": "off"}]


@functools.cache
def refusals() -> dict[str, list[str]]:
    return told("refuses", 3, PLANS)


def refused() -> list[str]:
    """All under every plan."""
    return [case_name({"model": model, **plan}) for plan in PLANS for model in (*REFUSED, "a loss of a listed module")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", refused())
def test_what_cannot_be_one_weight_is_refused(name: str) -> None:
    assert refusals()[name] == []


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
    found = told("run_cases", world, asked)
    assert found.keys() == {case_name(case) for case in asked}
    assert not {name: problem for name, problem in found.items() if problem}
