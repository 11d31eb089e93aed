"""Kandinsky 3: three skips, projected text that travels, masks that the model cannot do without."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import assert_matches_export, assert_transparent, interpret
from support.small_models import kandinsky_entries, small_kandinsky3
from torch import Tensor

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.models import to_layers


def forward(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch, return_dict=False)[0]


@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_transparent(granularity):
    layers = assert_transparent(small_kandinsky3(), kandinsky_entries(), forward, granularity=granularity)
    assert [name for layer in layers for name in layer.stash] == ["temb", "text_states", "skip0", "skip1", "skip2"]
    assert [layer.name for layer in layers for name in layer.pop if name.startswith("skip")] == [
        f"up_blocks.{level}.resnets_in.0" for level in (1, 2, 3)
    ]


def test_names_match_the_exported_model():
    model = small_kandinsky3()
    finer = to_layers(model, granularity="fine")
    assert_matches_export(model, to_layers(model), kandinsky_entries(), forward, finer)


def test_sizes_that_the_model_refuses_are_named():
    with pytest.raises(BatchError, match=r"up_blocks\.2\.resnets_in\.0.*is 2x2, its skip 3x2.*takes no other sizes"):
        interpret(to_layers(small_kandinsky3()), kandinsky_entries(size=(12, 8)))
