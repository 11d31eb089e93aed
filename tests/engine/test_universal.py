"""DeepSpeed's universal checkpoints: what we write is converted by its tool, and what that makes fits any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.launch import launch

from deepspeed_pulse.engine.checkpoints.universal import read_weights
from deepspeed_pulse.errors import FileError


def test_universal_checkpoints_go_to_and_from_upstream_and_any_plan(tmp_path: Path) -> None:
    launch("support.universal_ranks:resumes", 4, str(tmp_path), timeout=280)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 9))
    with pytest.raises(FileError, match=r"w/fp32\.pt: expected a tensor of shape \[4, 9\], found \[6, 6\]; build"):
        read_weights(tmp_path, {"w": weight}, lambda _: {"param": torch.zeros(6, 6)})
