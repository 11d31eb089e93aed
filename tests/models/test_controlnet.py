"""A U-Net and its ControlNet in one list: both trained, or the ControlNet alone as in diffusers' training script."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from diffusers import ControlNetModel
from support.families import assert_matches_export, assert_transparent
from support.launch import launch
from support.small_controlnet import Both, both, entries, forward, layers_of
from support.small_models import sdxl_entries, small_controlled_unet, small_sdxl_unet, small_unet
from torch import nn

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models import to_layers


@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_both_train(granularity):
    layers = assert_transparent(both(0.5), entries(), forward, make=layers_of, granularity=granularity)
    owners = Counter(layer.layer.origin.model_class.__name__ for layer in layers)
    assert owners.keys() == {"UNet2DConditionModel", "ControlNetModel"}
    assert [layer.name for layer in layers[:3]] == ["conv_in", "controlnet.conv_in", "down_blocks.0.resnets.0"]


def test_skips_of_both_nest_strictly():
    waiting = []
    for layer in layers_of(both()):
        popped = [name for name in layer.pop if "skip" in name and not name.startswith("controlled")]
        assert sorted(popped) == sorted(waiting.pop() for _ in popped)
        waiting += [name for name in layer.stash if "skip" in name and not name.startswith("controlled")]
    assert not waiting


def test_the_controlnet_alone_trains():
    models = both()
    models.unet.requires_grad_(False)
    assert_transparent(models, entries(), forward, make=layers_of)


def test_names_match_the_exported_models():
    models, batch = both(), entries()
    assert_matches_export(models, layers_of(models), batch, forward, layers_of(models, granularity="fine"))


def test_any_size_of_latent():
    assert_transparent(both(), entries(size=(9, 15)), forward, ranks=(1, 2), make=layers_of, upsample_size=True)


@pytest.mark.parametrize(
    ("unet", "config"),
    [
        ({}, {"global_pool_conditions": True}),
        ({}, {"controlnet_conditioning_channel_order": "bgr"}),
        ({"mid_block_type": "UNetMidBlock2D"}, {"mid_block_type": "UNetMidBlock2D"}),
        ({"encoder_hid_dim": 32}, {}),
        ({"only_cross_attention": True}, {}),
    ],
    ids=["pooled", "bgr", "middle", "text", "cross"],
)
def test_variants(unet, config):
    assert_transparent(both(unet=unet, **config), entries(), forward, ranks=(1,), make=layers_of)


def test_masked_text_is_read_by_the_unet_alone():
    batch = {**entries(), "encoder_attention_mask": torch.tensor([[1] * 7, [1] * 3 + [0] * 4])}
    layers = assert_transparent(both(), batch, forward, ranks=(1,), make=layers_of, encoder_attention_mask=True)
    readers = [layer.name for layer in layers if "encoder_attention_mask" in layer.pop]
    assert readers
    assert not any(name.startswith("controlnet.") for name in readers)


def test_sdxl():
    unet = small_sdxl_unet(layers_per_block=1, transformer_layers_per_block=1)
    controlnet = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8))
    for parameter in controlnet.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    batch = {**sdxl_entries(), "controlnet_cond": torch.rand(2, 3, 32, 32)}
    assert_transparent(Both(unet, controlnet), batch, forward, ranks=(1,), make=layers_of)


def test_what_does_not_fit_is_named():
    with pytest.raises(GraphError, match="controlnet: expected a ControlNetModel, found UNet2DModel"):
        to_layers(small_controlled_unet(), controlnet=small_unet())
    with pytest.raises(GraphError, match=r"conditioning_scale=0\.5 scales what a ControlNet adds"):
        to_layers(small_controlled_unet(), conditioning_scale=0.5)
    with pytest.raises(GraphError, match="encoder stores 9 skips, the U-Net's 6"):
        layers_of(both(layers_per_block=2))
    with pytest.raises(GraphError, match="attention_mask=True was asked for, which is not supported beside a Contr"):
        layers_of(both(), attention_mask=True)
    models = both()
    models.controlnet.set_attention_slice(2)
    with pytest.raises(GraphError, match="this ControlNetModel cannot become a layer list"):
        layers_of(models)


def test_training_on_two_ranks_equals_one_process(tmp_path):
    """The ControlNet trains, the U-Net is frozen; each is saved by itself."""
    assert str(launch("support.small_controlnet:trains", 2, str(tmp_path))).count("PASSED") == 2
