"""``eval_batch``: upstream's options, several losses, and sampling between training steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.launch import launch

from deepspeed_pulse.engine.losses import _check_output
from deepspeed_pulse.errors import ConfigError


def test_options_give_what_upstream_documents(tmp_path: Path) -> None:
    """Several losses are averaged each."""
    launch("support.evaluation_ranks:on_four_ranks", 4, str(tmp_path), timeout=250)


def test_ranks_sample_together_between_training_steps() -> None:
    launch("support.evaluation_ranks:samples", 2, timeout=250)


@pytest.mark.parametrize("found", [{"sample": torch.ones(1)}, 3.0, [torch.ones(1), None]])
def test_an_output_that_is_no_tensor_is_named(found: object) -> None:
    with pytest.raises(
        ConfigError, match=r"loss_fn: expected a tensor or a tuple of tensors .* found (dict|float|list)"
    ):
        _check_output(found, "loss_fn")
    _check_output(torch.ones(1), "loss_fn")
    _check_output((torch.ones(1), torch.ones(2)), "loss_fn")
