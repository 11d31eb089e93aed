"""Weights that cease to train between steps, and begin again, as a script that freezes a part for a while has them."""

from __future__ import annotations

import pytest
from support.cases import launch_each

ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
CASES = [
    {"P": 2, "placement": "wave"},
    {"P": 2, "placement": "linear"},
    {"P": 2, "placement": "linear", "pulse": {"split_backward": True}},
    {"P": 2, "placement": "wave", "pulse": {"split_backward": True}},
    {"P": 2, "placement": "wave", "interval": 1},
    {"P": 1, "placement": "linear"},
    {"P": 1, "placement": "linear", "momentum": 0.0, "config": ZERO_1},
]
STEPPED_IN_ONE = [
    {"P": 1, "lr": 0, "config": ZERO_1},
    {"P": 2, "lr": 0, "config": {"bf16": {"enabled": True}}},
    {"P": 2, "lr": 0, "config": {"bf16": {"enabled": True}, **ZERO_1}},
]


@pytest.mark.timeout(400)
def test_layers_that_are_frozen_for_a_while(subtests: pytest.Subtests) -> None:
    cases = [*CASES, *STEPPED_IN_ONE]
    first, _ = launch_each(subtests, "support.thawing_ranks:run", 2, cases, timeout=300)
    told = ["pulse: warning: weights were frozen" in text.partition("PASSED")[0] for text in first.split("CASE ")[1:]]
    assert told == ["config" in case for case in cases]
