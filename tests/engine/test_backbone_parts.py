"""Encoders, adapters, changing shapes and batch sizes with several backbones: each trains as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.cases import launch_each


def cases(P: int) -> list[dict[str, Any]]:
    opposite = {"P": P, "M": 2, "directions": "opposite"}
    return [
        {**opposite, "set": "two encoded"},
        {**opposite, "set": "encoded and toy", "P": P // 2, "zero": 1, "clip": 0.1, "M": 3},
        {**opposite, "set": "two of tokens", "dynamic": True, "M": 3},
        {**opposite, "set": "toy and lora", "clip": 0.1},
        {**opposite, "set": "unet and uvit"},
        {**opposite, "set": "two toys", "then M": 3},
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_each_trains_as_if_alone(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.backbone_ranks:run_cases", world, cases(world), timeout=800)
