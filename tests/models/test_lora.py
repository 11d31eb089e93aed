"""LoRA and freezing over ranks: what trains, trains as in one process; what is frozen stays and is not sent for."""

from __future__ import annotations

from typing import Any

import pytest
from support.launch import launch

MIDDLE_ON = ("conv_in.*", "time_embedding.*", "down_blocks.*")
"""Patterns that freeze everything before the middle of a U-Net."""

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"P": 2, "lora": "everywhere", "clip": 0.0},
        {"P": 2, "lora": "last", "clip": 0.01},
        {"P": 2, "freeze": MIDDLE_ON, "clip": 0.0},
    ],
    4: [
        {"P": 4, "lora": "everywhere", "clip": 0.01},
        {"P": 4, "lora": "middle", "clip": 0.0},
        {"P": 4, "lora": "middle", "clip": 0.01, "zero": 1},
        {"P": 2, "lora": "last", "clip": 0.01, "zero": 1},
        {"P": 4, "freeze": MIDDLE_ON, "clip": 0.01},
    ],
}
"""World size to cases; with LoRA on one block all ranks but one have nothing to train."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", CASES)
def test_what_trains_trains_as_in_one_process(world: int) -> None:
    for _, output in launch("support.lora_ranks:run_cases", world, CASES[world], timeout=500):
        assert output.count("PASSED") == len(CASES[world])
