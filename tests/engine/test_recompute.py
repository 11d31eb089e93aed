"""Layers run again in backward inside DeepSpeed: same numbers, dropout included, less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cases import launch_each
from support.launch import launch
from support.versions import has_checkpoints

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *[{"model": "noisy", "P": 1, "M": 3, "interval": n, "reentrant": n == 2} for n in (0, 1, 2, 8)],
        {"model": "toy", "P": 1, "M": 2, "interval": 3, "clip": 0.1},
    ],
    4: [
        *[{"model": "noisy", "P": 4, "M": m, "interval": n, "reentrant": m == 3} for n, m in ((0, 3), (1, 8), (2, 3))],
        *[{"model": "noisy", "P": 2, "M": m, "interval": n, "reentrant": m == 3} for n, m in ((0, 1), (1, 1), (4, 3))],
        {"model": "noisy", "P": 2, "M": 3, "interval": 1, "checkpointable": ["Noisy"]},
        {"model": "noisy", "P": 4, "M": 3, "interval": 1, "placement": "linear"},
        *[{"model": "noisy", "P": 2, "M": 3, "interval": 8, "enabled": False} for _ in range(has_checkpoints())],
        {"model": "toy", "P": 4, "M": 3, "interval": 1, "clip": 0.1},
        {"model": "toy", "P": 2, "M": 3, "interval": 2, "reentrant": True, "W": 2},
        {"model": "tokens", "P": 4, "M": 3, "interval": 1, "dynamic": True},
        {"model": "tokens", "P": 2, "M": 3, "interval": 2, "dynamic": True, "reentrant": True},
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_recomputed_layers_train_as_if_unpartitioned(subtests: pytest.Subtests, world: int) -> None:
    cases = [{"clip": 0.0, "enabled": True, **case} for case in CASES[world]]
    launch_each(subtests, "support.parity:run_cases", world, cases, timeout=280)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_recomputed_layers_of_a_unet_train_as_if_unpartitioned(subtests: pytest.Subtests) -> None:
    case = {"model": "unet", "P": 4, "M": 2, "interval": 4, "clip": 0.0, "enabled": True}
    launch_each(subtests, "support.parity:run_cases", 4, [case], timeout=280)


def test_as_many_layers_are_recomputed_as_the_memory_needs(tmp_path: Path) -> None:
    found = launch("support.engine_ranks:recomputes", 2, str(tmp_path), timeout=200)
    assert "recomputed in backward:" in found[0][1]
    print(found[0][1].splitlines()[-1])
    for _, output in found:
        assert "PASSED" in output
