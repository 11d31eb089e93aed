"""The checks that every family goes through can fail: each fault planted here is found, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.dataflow import exported, flow_of_list, parts_of, reads_of_export
from support.families import assert_one_owner, assert_transparent, differences, flatten, swap_two_pops
from support.small_models import pixel_entries, small_unet
from torch import nn

from deepspeed_pulse.engine.specs import spec
from deepspeed_pulse.models import to_layers


def forward(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch, return_dict=False)[0]


@pytest.fixture(scope="module")
def model_seen() -> tuple[list[Any], dict[str, nn.Module], dict[str, frozenset[str]]]:
    model = small_unet()
    layers = to_layers(model)
    parts = parts_of(model, layers)
    return layers, parts, reads_of_export(exported(model, pixel_entries(), forward), pixel_entries(), parts)


def test_two_swapped_pops(model_seen):
    layers, parts, expected = model_seen
    flow = flow_of_list(layers, pixel_entries(), parts)
    assert differences(flow, expected) == []
    swapped = swap_two_pops(layers, flow.shapes)
    assert differences(flow_of_list(swapped, pixel_entries(), parts), expected) == [
        "up_blocks.1.resnets.0: in the model it reads also ['down_blocks.1.attentions.0'], "
        "in the list ['down_blocks.0.downsamplers.0']",
        "up_blocks.1.resnets.1: in the model it reads also ['down_blocks.0.downsamplers.0'], "
        "in the list ['down_blocks.1.attentions.0']",
    ]


def test_a_value_popped_in_vain(model_seen):
    layers, parts, expected = model_seen
    last = layers[-1]
    idle = spec(_Ignoring(last.layer), name="idle", pop="temb")
    assert differences(flow_of_list([*layers[:-1], idle], pixel_entries(), parts), expected) == [
        "idle: temb is not read"
    ]


class _Ignoring(nn.Module):
    def __init__(self, unit: Any) -> None:
        super().__init__()
        self.unit, self.paths = unit, unit.paths

    def get_submodule(self, target: str) -> nn.Module:
        return self.unit.get_submodule(target)

    def forward(self, hidden: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.unit(hidden)


def test_nested_entries_have_dotted_names():
    one = torch.ones(1)
    batch = {"sample": one, "added_cond_kwargs": {"text_embeds": one, "deeper": {"x": one}}, "rotary": (one, one)}
    assert list(flatten(batch)) == ["sample", "added_cond_kwargs.text_embeds", "added_cond_kwargs.deeper.x", "rotary"]


def test_a_model_that_computes_something_else():
    def other(model: Any, batch: Any) -> torch.Tensor:
        return forward(model, {**batch, "class_labels": 0 * batch["class_labels"]})

    with pytest.raises(AssertionError, match="outputs differ by"):
        assert_transparent(small_unet(), pixel_entries(), other, ranks=(1,))
    with pytest.raises(AssertionError, match=r"2 ranks, waves 1"):
        assert_transparent(small_unet(), pixel_entries(), other, ranks=(2,))


def test_gradients_that_prove_nothing():
    model = small_unet()
    with torch.no_grad():
        model.down_blocks[1].attentions[0].to_out[0].weight.zero_()
    with pytest.raises(AssertionError, match=r"attentions\.0\.group_norm\.weight: a zero gradient proves nothing"):
        assert_transparent(model, pixel_entries(), forward, ranks=(1,))


def test_a_parameter_in_two_layers_or_none():
    model = small_unet()
    layers = to_layers(model)
    with pytest.raises(AssertionError, match=r"held by several layers: \{'conv_out\.weight': 2, 'conv_out\.bias': 2\}"):
        assert_one_owner(model, [*layers, spec(model.conv_out)])
    with pytest.raises(AssertionError, match=r"conv_out\.weight"):
        assert_one_owner(model, layers[:-1])
