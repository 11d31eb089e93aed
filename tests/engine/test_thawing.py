"""Weights that cease to train between steps, and begin again, as a script that freezes a part for a while has them."""

from __future__ import annotations

import pytest
from support.cases import launch_each

ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
IN_PLACE = ("in place seen", "in place apart", "in place alexnet")
CASES = [
    {"P": 2, "placement": "wave"},
    {"P": 2, "placement": "linear"},
    {"P": 2, "placement": "linear", "pulse": {"split_backward": True}},
    {"P": 2, "placement": "wave", "pulse": {"split_backward": True}},
    {"P": 2, "placement": "wave", "interval": 1},
    {"P": 1, "placement": "linear"},
    *({"P": 2, "placement": "linear", "model": model} for model in IN_PLACE),
    *({"P": 2, "placement": "linear", "model": model, "pulse": {"split_backward": True}} for model in IN_PLACE),
    {"P": 1, "placement": "linear", "model": "in place seen"},
    {"P": 1, "placement": "linear", "momentum": 0.0, "config": ZERO_1},
]
BF16 = {"bf16": {"enabled": True}}
STEPPED_IN_ONE = [
    {"check": "a rate of 0", "P": 1, "config": ZERO_1},
    {"check": "a rate of 0", "P": 2, "config": BF16},
    {"check": "a rate of 0", "P": 2, "config": {**BF16, **ZERO_1}},
]
IN_NO_GROUP = [{"check": "no group", "adds": False}, {"check": "no group", "adds": True}]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_of_a_thawed_weight(subtests: pytest.Subtests, ranks: int) -> None:
    cases: list[dict[str, object]] = [{"check": "copies"}, {"check": "copies", "config": {**BF16, **ZERO_1}}]
    launch_each(subtests, "support.thawing_ranks:run", ranks, cases, timeout=300)


@pytest.mark.timeout(400)
def test_layers_that_are_frozen_for_a_while(subtests: pytest.Subtests) -> None:
    cases = [*CASES, *STEPPED_IN_ONE, *IN_NO_GROUP]
    first, _ = launch_each(subtests, "support.thawing_ranks:run", 2, cases, timeout=300)
    told = [text.partition("PASSED")[0] for text in first.split("CASE ")[1:]]
    assert ["pulse: warning: weights were frozen" in text for text in told] == ["config" in case for case in cases]
    left_out = ["not given 2 trainable parameters" in text for text in told]
    assert left_out == [case in IN_NO_GROUP for case in cases]
