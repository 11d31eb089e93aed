"""Encoders, adapters, changing shapes and batch sizes with several backbones: each trains as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.cases import launch_each

OPPOSITE = {"P": 4, "M": 2, "directions": "opposite"}
CASES: list[dict[str, Any]] = [
    {**OPPOSITE, "set": "two encoded"},
    {**OPPOSITE, "set": "encoded and toy", "P": 2, "zero": 1, "clip": 0.1, "M": 3},
    {**OPPOSITE, "set": "two of tokens", "dynamic": True, "M": 3},
    {**OPPOSITE, "set": "toy and lora", "clip": 0.1},
    {**OPPOSITE, "set": "unet and uvit"},
    {**OPPOSITE, "set": "two toys", "then M": 3},
]


@pytest.mark.timeout(900)
def test_each_trains_as_if_alone(subtests: pytest.Subtests) -> None:
    launch_each(subtests, "support.backbone_ranks:run_cases", 4, CASES, timeout=800)
