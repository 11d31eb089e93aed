"""Layers that change tensors in place train as the unpartitioned model does, on real ranks, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
from support.launch import launch

WAYS: dict[str, dict[str, Any]] = {
    "wave": {},
    "linear": {"placement": "linear"},
    "replicas": {"P": 2},
    "recomputed": {"interval": 1},
    "recomputed by twos": {"interval": 2, "placement": "linear"},
    "recomputed, reentrant": {"interval": 1, "reentrant": True},
    "data on the first rank only": {"first_rank_only": True},
    "data on the first rank only, linear": {"first_rank_only": True, "placement": "linear"},
    "one microbatch": {"M": 1},
    "changing shapes": {"M": 1, "dynamic": True},
}
CASES = {
    f"{model}, {way}": {"model": f"in place {model}", "P": 4, "M": 2, "clip": 0.1, "enabled": True, **changes}
    for model, ways in {
        **dict.fromkeys(("alexnet", "seen", "statistics"), WAYS),
        "normalised": {
            **{way: WAYS[way] for way in ("wave", "replicas", "recomputed by twos", "recomputed, reentrant")},
            "in halves": {"placement": "linear", "pulse": {"split_backward": True}},
            "off": {"enabled": False},
        },
    }.items()
    for way, changes in ways.items()
}


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    found = launch("support.parity:run_cases", 4, list(CASES.values()), timeout=250, check=False)
    return [output for _, output in found]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_if_unpartitioned(outputs: list[str], name: str) -> None:
    for output in outputs:
        assert f"PASSED {CASES[name]}" in output, output[-4000:]
