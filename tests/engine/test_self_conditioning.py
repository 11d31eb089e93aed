"""Self-conditioning on real ranks: what one process that draws the same microbatches trains."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.cases import launch_each
from support.selfcond_ranks import REFUSED


def whole_product(world: int) -> list[dict[str, Any]]:
    """Ranks, microbatches and placements; what reads the estimate and what else a plan may have by turns."""
    found: list[dict[str, Any]] = []
    for P, M, place in itertools.product([p for p in (1, 2, 4) if world % p == 0], (1, 2, 4), ("wave", "linear")):
        base = {"P": P, "M": M, "placement": place}
        found += [
            {**base, "clip": 0.1},
            {**base, "p": 1.0, "readers": [0, 9], "zero": 1},
            {**base, "p": 0.7, "readers": [4], "dropout": 0.3},
            {**base, "p": 0.3, "readers": [9], "interval": 1},
            {**base, "frozen": True},
            {**base, "several": [["base", 0.5], ["up", 0.9]]},
            {**base, "several": [["base", None], ["up", 0.5]], "readers": [0, 9], "clip": 0.1, "apart": True},
        ]
    return found


def some(world: int) -> list[dict[str, Any]]:
    P = max(p for p in (1, 2, 4) if world % p == 0)
    halves = {"schedule": "zbv", "split_backward": True}
    found: list[dict[str, Any]] = [
        {"P": P, "M": 4, "placement": "wave", "clip": 0.1},
        {"P": P, "M": 4, "placement": "linear", "readers": [0, 9], "p": 0.75},
        {"P": max(1, P // 2), "M": 3, "placement": "linear", "p": 1.0, "readers": [9], "zero": 1, "interval": 1},
        {"P": P, "M": 2, "placement": "wave", "p": 0.0},
    ]
    if P > 1:
        found += [
            {"P": P, "M": 4, "placement": "wave", "readers": [4], "dropout": 0.3, "pulse": halves},
            {"P": P, "M": 4, "placement": "wave", "frozen": True},
            {"P": 2, "M": 4, "placement": "linear", "frozen": True, "p": 0.7},
            {"P": 2, "M": 4, "placement": "wave", "several": [["base", 0.25], ["up", 0.75]]},
            {"P": 2, "M": 4, "placement": "linear", "several": [["base", 0.5], ["up", None]]},
            {"P": P, "M": 4, "placement": "wave", "several": [["base", 0.5], ["up", 0.5]], "apart": True},
        ]
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(4, marks=pytest.mark.soak)])
def test_equal_to_one_process(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.selfcond_ranks:run_cases", world, some(world), timeout=300)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", (1, 2, 4))
def test_the_whole_product(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.selfcond_ranks:run_cases", world, whole_product(world), timeout=2900)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_run_goes_on_under_another_plan(subtests: pytest.Subtests, tmp_path: Path, world: int) -> None:
    cases = [
        {"P": world, "M": 4, "placement": "wave", "then": {"placement": "linear"}},
        {"P": 2, "M": 4, "placement": "linear", "p": 0.75, "then": {"placement": "wave"}},
    ]
    arguments = {"folder": str(tmp_path), "cases": cases}
    launch_each(subtests, "support.selfcond_ranks:resumes", world, cases, arguments, timeout=300)


@pytest.mark.timeout(300)
def test_bad_input_is_refused_in_the_same_words_on_every_rank(subtests: pytest.Subtests) -> None:
    launch_each(subtests, "support.selfcond_ranks:refuses", 2, list(REFUSED), timeout=200)
