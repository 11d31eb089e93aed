"""U-Nets that denoise frames: Stable Video Diffusion, text to video, AnimateDiff."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import assert_matches_export, assert_transparent, interpret
from support.small_models import (
    motion_entries,
    small_motion_unet,
    small_svd_unet,
    small_unet_3d,
    svd_entries,
    video_entries,
)
from torch import Tensor

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.models import to_layers

FAMILIES = {
    "svd": (small_svd_unet, svd_entries),
    "3d": (small_unet_3d, video_entries),
    "motion": (small_motion_unet, motion_entries),
}


def forward(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch, return_dict=False)[0]


@pytest.mark.parametrize("granularity", ["block", "fine"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transparent(family, granularity):
    make, entries = FAMILIES[family]
    layers = assert_transparent(make(), entries(), forward, granularity=granularity)
    skips = [name for layer in layers for name in layer.stash if name.startswith("skip")]
    assert skips == ["skip0", "skip1", "skip2", "skip3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_match_the_exported_model(family):
    make, entries = FAMILIES[family]
    model = make()
    finer = to_layers(model, granularity="fine")
    assert_matches_export(model, to_layers(model), entries(), forward, finer)


@pytest.mark.parametrize("granularity", ["block", "fine"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_size_of_latent(family, granularity):
    make, entries = FAMILIES[family]
    options = {"ranks": (1,), "granularity": granularity, "upsample_size": True}
    assert_transparent(make(), entries(size=(9, 7), frames=2), forward, **options)


def test_distilled_guidance():
    batch = {**video_entries(), "timestep_cond": torch.randn(2, 6)}
    assert_transparent(small_unet_3d(time_cond_proj_dim=6), batch, forward, ranks=(1,), timestep_cond=True)


def test_odd_latent_without_sizes_is_an_error_that_names_the_option():
    layers = to_layers(small_unet_3d())
    with pytest.raises(BatchError, match=r"up_blocks\.1\.resnets\.0.*upsample_size=True"):
        interpret(layers, video_entries(size=(9, 8)))


def test_transformers_of_several_blocks_share_their_mix_and_stay_whole():
    model = small_svd_unet(transformer_layers_per_block=2)
    names = [layer.name for layer in to_layers(model, granularity="fine")]
    assert "down_blocks.0.attentions.0" in names
    assert_transparent(model, svd_entries(), forward, ranks=(1,), granularity="fine")


def test_animatediff_variants():
    model = small_motion_unet(
        use_motion_mid_block=False,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        temporal_transformer_layers_per_block=2,
    )
    added = {"text_embeds": torch.randn(2, 32), "time_ids": torch.rand(2, 6)}
    batch = {**motion_entries(), "added_cond_kwargs": added}
    for granularity in ("block", "fine"):
        assert_transparent(model, batch, forward, ranks=(1,), granularity=granularity)


def test_only_motion_modules_train():
    """As AnimateDiff is trained: ranks may hold nothing that trains."""
    model = small_motion_unet()
    model.freeze_unet2d_params()
    assert_transparent(model, motion_entries(), forward, ranks=(1, 4))


def test_unsupported_parts_are_named():
    with pytest.raises(GraphError, match=r"config\.encoder_hid_dim_type is 'ip_image_proj', supported: None"):
        model = small_motion_unet()
        model.register_to_config(encoder_hid_dim_type="ip_image_proj")
        to_layers(model)
    model = small_unet_3d()
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    with pytest.raises(GraphError, match=r"up_blocks\.0 has FreeU enabled"):
        to_layers(model)
    model = small_unet_3d()
    model.enable_forward_chunking(1)
    with pytest.raises(GraphError, match=r"runs in chunks; call model\.disable_forward_chunking"):
        to_layers(model)
