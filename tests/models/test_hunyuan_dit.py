"""HunyuanDiT as a layer list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import HunyuanDiT2DModel
from support.families import assert_matches_export, assert_transparent, interpret
from support.small_transformers import hunyuan_dit_batch, small_hunyuan_dit
from torch import Tensor

from deepspeed_pulse.models import to_layers


def forward(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch, return_dict=False)[0]


@pytest.mark.parametrize(("sized", "granularity"), [(False, "fine"), (True, "block")], ids=["1.2-fine", "1.1-block"])
def test_transparent(sized, granularity):
    model = small_hunyuan_dit(use_style_cond_and_image_meta_size=sized)
    batch = hunyuan_dit_batch(sizes_and_style=sized)
    layers = assert_transparent(model, batch, forward, ranks=(1,) if sized else (1, 2, 4), granularity=granularity)
    assert_matches_export(model, layers, batch, forward)


def test_pictures_that_are_not_square():
    assert_transparent(small_hunyuan_dit(), hunyuan_dit_batch(size=(8, 12)), forward, ranks=(1, 2))


def test_without_a_rotary_table():
    batch = hunyuan_dit_batch()
    del batch["image_rotary_emb"]
    layers = assert_transparent(small_hunyuan_dit(), batch, forward, ranks=(1,), image_rotary_emb=False)
    assert all("image_rotary_emb" not in layer.pop for layer in layers)


def test_the_masks_are_read():
    layers, batch = to_layers(small_hunyuan_dit()), hunyuan_dit_batch()
    full = {name: torch.ones_like(value) for name, value in batch.items() if "mask" in name}
    assert not torch.equal(interpret(layers, batch), interpret(layers, {**batch, **full}))


def test_skips_nest_and_the_middle_blocks_have_none():
    layers = to_layers(small_hunyuan_dit())
    assert [layer.name for layer in layers] == ["pos_embed", *(f"blocks.{index}" for index in range(8)), "proj_out"]
    assert layers[0].stash == ("patches", "temb", "text_states")
    stashed = {layer.name: name for layer in layers for name in layer.stash if name.startswith("skip")}
    popped = {name: layer.name for layer in layers for name in layer.pop if name.startswith("skip")}
    assert {source: popped[name] for source, name in stashed.items()} == {
        "blocks.0": "blocks.7",
        "blocks.1": "blocks.6",
        "blocks.2": "blocks.5",
    }


def test_fine_layers_are_halves_of_blocks():
    layers = to_layers(small_hunyuan_dit(), granularity="fine")
    assert len(layers) == 18
    assert [(layer.name, layer.stash) for layer in layers[1:3]] == [("blocks.0.attn", ()), ("blocks.0.ff", ("skip0",))]


def test_published_size():
    """Tencent-Hunyuan/HunyuanDiT-v1.2."""
    with torch.device("meta"):
        model = HunyuanDiT2DModel(
            num_attention_heads=16,
            attention_head_dim=88,
            in_channels=4,
            patch_size=2,
            sample_size=128,
            hidden_size=1408,
            num_layers=40,
            mlp_ratio=4.3637,
            use_style_cond_and_image_meta_size=False,
        )
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 1500
    layers = to_layers(model)
    assert (len(layers), sum(name.startswith("skip") for layer in layers for name in layer.stash)) == (42, 19)
