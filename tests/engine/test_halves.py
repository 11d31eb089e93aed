"""Backward in two halves on real ranks: loss, every gradient and the weights equal the unpartitioned model's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.cases import launch_each

HALVES = {"split_backward": True}
LAYOUTS = {1: [1], 2: [1, 2], 3: [3], 4: [2, 4]}
"""World size to pipeline ranks; the rest are replicas."""


def case(model: str, ranks: int, microbatches: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "P": ranks, "M": microbatches, "clip": 0.1, "enabled": True, "pulse": HALVES, **more}


def some(world: int) -> list[dict[str, Any]]:
    """One of each kind."""
    ranks = LAYOUTS[world][-1]
    return [
        *[case("toy", ranks, m, W=w) for m, w in ((1, 1), (3, 1), (8, 1), (3, 2)) if 2 * ranks * w <= 10],
        *[case("toy", ranks, 4, pulse={**HALVES, "schedule": schedule}) for schedule in ("zbv", "gpipe")],
        case("toy", ranks, 3, placement="linear"),
        case("toy", ranks, 4, interval=1),
        case("toy", ranks, 4, interval=2, reentrant=True),
        *[case("toy", fewer, 3) for fewer in LAYOUTS[world][:-1]],
        case("tokens", ranks, 3, dynamic=True),
        *([case("assorted", ranks, 2)] if ranks <= 3 else []),
        case("noisy", ranks, 3, interval=1),
        case("unet", ranks, 2),
    ]


def product(world: int) -> list[dict[str, Any]]:
    """Of the toy network and the U-Net. In a few of these the best order has no use for halves."""
    more = {"whole_may_be_faster": True}
    kinds = itertools.product(("toy", "unet"), LAYOUTS[world], (1, 2, 3, 8), (1, 2), (0, 1))
    return [
        case(model, p, m, W=w, interval=i, **more) for model, p, m, w, i in kinds if model != "toy" or 2 * p * w <= 10
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_halves_train_as_if_unpartitioned(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.parity:run_cases", world, some(world), timeout=550)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", LAYOUTS)
def test_the_whole_product(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.parity:run_cases", world, product(world), timeout=3500)
