"""UniDiffuser as a layer list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import assert_matches_export, assert_transparent, interpret
from support.small_transformers import small_unidiffuser, unidiffuser_batch
from torch import Tensor, nn

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.models import to_layers

UNUSED = ("transformer.pos_embed.proj.weight", "transformer.pos_embed.proj.bias")


def forward(model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
    return model(**batch)


@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_transparent(granularity):
    options = {"without_gradient": UNUSED, "granularity": granularity}
    assert_transparent(small_unidiffuser(), unidiffuser_batch(), forward, **options)


def test_matches_the_exported_model():
    model = small_unidiffuser()
    finer = to_layers(model, granularity="fine")
    assert_matches_export(model, to_layers(model), unidiffuser_batch(), forward, finer)


@pytest.mark.parametrize("granularity", ["block", "fine"])
@pytest.mark.parametrize("pre_layer_norm", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("block_type", ["unidiffuser", "plain"])
def test_every_order_of_norm_and_residual(block_type, pre_layer_norm, granularity):
    model = small_unidiffuser(block_type=block_type, pre_layer_norm=pre_layer_norm, num_layers=2)
    assert_transparent(
        model, unidiffuser_batch(), forward, ranks=(1,), without_gradient=UNUSED, granularity=granularity
    )


def test_states_to_attend_to():
    model = small_unidiffuser(cross_attention_dim=64, num_layers=2)
    batch = {**unidiffuser_batch(), "encoder_hidden_states": torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 64)}
    options = {"ranks": (1,), "without_gradient": UNUSED, "encoder_hidden_states": True}
    lists = [assert_transparent(model, batch, forward, **options, granularity=each) for each in ("block", "fine")]
    assert_matches_export(model, lists[0], batch, forward, lists[1])


@pytest.mark.parametrize("given", [False, True])
def test_data_types(given):
    model = small_unidiffuser(use_data_type_embedding=True, use_timestep_embedding=True, num_layers=2)
    batch = {**unidiffuser_batch(), **({"data_type": torch.tensor([0, 1])} if given else {})}
    assert_transparent(model, batch, forward, ranks=(1,), without_gradient=UNUSED, data_type=given)


def test_one_time_for_all_samples():
    batch = {**unidiffuser_batch(), "timestep_img": torch.tensor(7), "timestep_text": torch.tensor([3])}
    assert_transparent(small_unidiffuser(num_layers=2), batch, forward, ranks=(1,), without_gradient=UNUSED)


def test_names():
    layers = to_layers(small_unidiffuser())
    assert [layer.name for layer in layers[2:6]] == [
        "transformer_in_blocks.1",
        "transformer_in_blocks.2",
        "transformer_mid_block",
        "transformer_out_blocks.0",
    ]
    assert layers[5].pop == layers[3].stash == ("skip2",)


def test_all_problems_are_listed_at_once():
    model = small_unidiffuser()
    model.transformer.transformer_mid_block = nn.Identity()
    with pytest.raises(GraphError) as caught:
        to_layers(model, data_type=True, encoder_hidden_states=True)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "data_type=True was asked for, but config.use_data_type_embedding is False",
        "encoder_hidden_states=True was asked for, but config.cross_attention_dim is None",
        "transformer.transformer_mid_block is a Identity, supported: UniDiffuserBlock, UTransformerBlock",
    ]


def test_texts_of_another_length():
    batch = {**unidiffuser_batch(), "prompt_embeds": torch.zeros(2, 6, 12)}
    with pytest.raises(BatchError, match=r"expected 5 text tokens \(config.num_text_tokens\), found 6"):
        interpret(to_layers(small_unidiffuser()), batch)
