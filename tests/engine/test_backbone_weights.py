"""Weights and checkpoints of one of several backbones, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import launch_each
from support.launch import launch

EACH_ITS_GROUP = {"rates": [0.02, 0.01]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_a_backbone_moves_between_runs(subtests: pytest.Subtests, tmp_path: Path, world: int) -> None:
    opposite = {"P": world, "M": 2, "set": "two toys", "directions": "opposite"}
    cases = [
        {**opposite, "from": "alone"},
        {**opposite, "from": "joint"},
        {**opposite, "from": "alone", "adam": True, "P": world // 2, **EACH_ITS_GROUP, "zero": 1},
        {**opposite, "from": "alone", "adam": True, "P": world // 2, **EACH_ITS_GROUP, "zero": 1, "zero alone": 0},
        {**opposite, "from": "joint", "adam": True, "P": world // 2, "zero": 1},
        {**opposite, "from": "alone", "adam": True, **EACH_ITS_GROUP, "precision": "bf16"},
        {**opposite, "from": "joint", "adam": True, "precision": "bf16"},
    ]
    arguments = {"cases": cases, "folder": str(tmp_path)}
    launch_each(subtests, "support.backbone_weights_ranks:crosses", world, cases, arguments, timeout=500)


@pytest.mark.timeout(300)
def test_each_is_exported(tmp_path: Path) -> None:
    outputs = launch("support.backbone_weights_ranks:exports", 2, str(tmp_path), timeout=250)
    assert all("EXPORTED" in output for _, output in outputs)
