"""Several backbones on real ranks: each trains as if it were alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.cases import launch_each

LAYOUTS = [(world, P) for world in (1, 2, 4) for P in (1, 2, 4) if world % P == 0]
"""Ranks of the world and of a pipeline; replicas where these are fewer."""


ON_FOUR: list[dict[str, Any]] = [
    {"P": 4, "M": 4, "directions": "opposite", "set": "two toys", "clip": 0.1},
    {"P": 4, "M": 2, "directions": "opposite", "set": "three toys", "zero": 1, "clip": 0.1},
    {"P": 2, "M": 2, "directions": "opposite", "set": "two toys", "zero": 1, "clip": 0.1},
]


def whole_product(P: int) -> list[dict[str, Any]]:
    """Microbatches and directions; precision, clipping and what runs again by turns."""
    found = []
    for M, way in itertools.product((1, 2, 4), ("same", "opposite")):
        base = {"P": P, "M": M, "directions": way}
        found += [
            {**base, "set": "two toys", "clip": 0.1},
            {**base, "set": "three toys", "zero": 1, "clip": 0.1},
            {**base, "set": "two toys", "precision": "bf16", "clip": 0.1},
            {**base, "set": "two toys", "interval": 1, "rates": [0.05, 0.01]},
            {**base, "set": "two encoded", "clip": 0.1},
            {**base, "set": "two unets"},
            {**base, "set": "unet and uvit", "clip": 0.1},
        ]
    return found


def some(world: int) -> list[dict[str, Any]]:
    P = max(p for p in (1, 2, 4) if world % p == 0)
    opposite = {"P": P, "M": 4, "directions": "opposite"}
    return [
        {**opposite, "set": "two toys", "clip": 0.1},
        {**opposite, "set": "three toys", "M": 2, "zero": 1, "clip": 0.1},
        {**opposite, "set": "two toys", "precision": "bf16", "clip": 0.1, "M": 2},
        {**opposite, "set": "two toys", "precision": "bf16", "zero": 1, "clip": 0.1, "M": 1},
        {"P": P, "M": 1, "set": "two toys", "directions": "same", "interval": 1, "rates": [0.05, 0.01]},
        {"P": max(1, P // 2), "M": 2, "set": "two toys", "directions": "opposite", "zero": 1, "clip": 0.1},
        {"P": P, "M": 2, "set": "two unets", "directions": "opposite"},
        {**opposite, "M": 2, "set": "two toys", "zero": 1, "clip": 0.1, "spoilt": 1},
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(4, marks=pytest.mark.soak)])
def test_each_trains_as_if_alone(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.backbone_ranks:run_cases", world, some(world), timeout=500)


@pytest.mark.timeout(600)
def test_on_four_ranks_each_trains_as_if_alone(subtests: pytest.Subtests) -> None:
    launch_each(subtests, "support.backbone_ranks:run_cases", 4, ON_FOUR, timeout=500)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("world", "P"), LAYOUTS)
def test_the_whole_product(subtests: pytest.Subtests, world: int, P: int) -> None:
    launch_each(subtests, "support.backbone_ranks:run_cases", world, whole_product(P), timeout=2900)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_run_goes_on_under_another_plan(subtests: pytest.Subtests, tmp_path: Path, world: int) -> None:
    cases = [
        {"P": world, "M": 4, "set": "two toys", "directions": "opposite", "then": {"directions": "same"}},
        {"P": world, "M": 2, "set": "two toys", "directions": "same", "then": {"placement": "linear"}},
        {
            "P": world // 2,
            "M": 2,
            "set": "two toys",
            "zero": 1,
            "directions": "same",
            "then": {"directions": "opposite"},
        },
    ]
    arguments = {"folder": str(tmp_path), "cases": cases}
    launch_each(subtests, "support.backbone_ranks:resumes", world, cases, arguments, timeout=500)


def some_apart(world: int) -> list[dict[str, Any]]:
    """Steps of their own: with clipping, schedules, replicas, more microbatches, recomputing, infinite gradients.

    Where a rank has whole backbones, a learning rate that is adapted to each.
    """
    P = max(p for p in (1, 2, 4) if world % p == 0)
    opposite = {"P": P, "directions": "opposite", "set": "two toys"}
    return [
        {**opposite, "M": 4, "clip": 0.1, "schedule": True},
        {"P": P, "M": 2, "directions": "same", "set": "three toys", "interval": 1},
        {**opposite, "M": 2, "precision": "bf16", "clip": 0.1, "schedule": True},
        {**opposite, "P": max(1, P // 2), "M": 2, "then M": 4, "clip": 0.1},
        {**opposite, "P": max(1, P // 2), "M": 2, "precision": "bf16", "zero": 1, "accumulate": "fp32", "clip": 0.1},
        {**opposite, "P": max(1, P // 2), "M": 2, "zero": 1, "clip": 0.1, "schedule": True},
        {**opposite, "P": max(1, P // 2), "M": 2, "precision": "bf16", "zero": 1, "then M": 4},
        {**opposite, "P": max(1, P // 2), "M": 2, "precision": "bf16", "zero": 1, "spoilt": 0},
        {**opposite, "P": max(1, P // 2), "M": 2, "zero": 1, "spoilt": 1, "clip": 0.1},
        {**opposite, "set": "two encoded", "M": 4, "clip": 0.1},
        {"P": max(1, P // 2), "M": 2, "directions": "same", "set": "encoded and toy", "adapting": world == 2},
    ]


def whole_product_apart(P: int) -> list[dict[str, Any]]:
    found = []
    for M, way in itertools.product((1, 2, 4), ("same", "opposite")):
        base = {"P": P, "M": M, "directions": way}
        found += [
            {**base, "set": "two toys", "clip": 0.1},
            {**base, "set": "three toys", "schedule": True},
            {**base, "set": "two toys", "precision": "bf16", "clip": 0.1},
            {**base, "set": "two toys", "precision": "bf16", "zero": 1, "accumulate": "fp32", "schedule": True},
            {**base, "set": "three toys", "zero": 1, "clip": 0.1},
            {**base, "set": "two toys", "precision": "bf16", "zero": 1, "schedule": True},
            {**base, "set": "two toys", "interval": 1, "rates": [0.05, 0.01]},
            {**base, "set": "two encoded", "clip": 0.1},
            {**base, "set": "two unets"},
            {**base, "set": "unet and uvit", "clip": 0.1},
        ]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_with_steps_of_their_own_each_trains_as_if_alone(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.backbone_apart_ranks:run_cases", world, some_apart(world), timeout=500)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("world", "P"), LAYOUTS)
def test_the_whole_product_of_steps_of_their_own(subtests: pytest.Subtests, world: int, P: int) -> None:
    launch_each(subtests, "support.backbone_apart_ranks:run_cases", world, whole_product_apart(P), timeout=2900)


@pytest.mark.timeout(600)
def test_steps_of_their_own_go_on_from_a_checkpoint(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases = [
        {"P": 2, "M": 2, "set": "two toys", "directions": "opposite", "adam": True},
        {"P": 2, "M": 2, "set": "two toys", "directions": "same", "clip": 0.1},
        {"P": 1, "M": 2, "set": "two toys", "directions": "opposite", "adam": True, "zero": 1},
    ]
    arguments = {"cases": cases, "folder": str(tmp_path)}
    launch_each(subtests, "support.backbone_apart_ranks:resumes", 2, cases, arguments, timeout=500)
