"""SD3, Flux, PixArt, Wan, HunyuanVideo and CogVideoX as layer lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import small_transformers as small
from support.families import assert_matches_export, assert_transparent, interpret
from torch import Tensor, nn

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models import to_layers

MODELS = {
    "sd3": (small.small_sd3, small.sd3_batch),
    "flux": (small.small_flux, small.flux_batch),
    "pixart": (small.small_pixart, small.pixart_batch),
    "wan": (small.small_wan, small.wan_batch),
    "hunyuan_video": (small.small_hunyuan_video, small.hunyuan_video_batch),
    "cogvideox": (small.small_cogvideox, small.cogvideox_batch),
}

# The last block of SD3 attends to the text without asking it anything.
UNUSED = {
    "sd3": tuple(
        f"transformer_blocks.5.attn.{name}" for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
    )
}

VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # model, configuration, what the batch has, options of to_layers
    "sd3.5": ("sd3", {"dual_attention_layers": (0, 1, 5), "qk_norm": "rms_norm"}, {}, {}),
    "flux with guidance": ("flux", {"guidance_embeds": True}, {"guidance": True}, {}),
    "flux of one kind": ("flux", {"num_single_layers": 0}, {}, {}),
    "pixart-alpha": (
        "pixart",
        {"use_additional_conditions": True},
        {"sizes": True, "masks": True},
        {"encoder_attention_mask": True, "attention_mask": True},
    ),
    "wan from a picture": ("wan", {"image_dim": 20, "added_kv_proj_dim": 64}, {"image": True}, {}),
    "wan 2.2": ("wan", {"cross_attn_norm": False}, {"time_of_tokens": True}, {}),
    "hunyuan_video without guidance": ("hunyuan_video", {"guidance_embeds": False}, {"guidance": False}, {}),
    "cogvideox-5b": ("cogvideox", {"use_rotary_positional_embeddings": True}, {"rotary_patches": 96}, {}),
    "cogvideox-1.5": (
        "cogvideox",
        {"use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 32},
        {"rotary_patches": 48, "offset": True},
        {},
    ),
}


def forward(model: Any, batch: dict[str, Any]) -> Tensor:
    return model(**batch, return_dict=False)[0]


@pytest.mark.parametrize("granularity", ["block", "fine"])
@pytest.mark.parametrize("name", MODELS)
def test_transparent(name, granularity):
    make, make_batch = MODELS[name]
    unused = UNUSED.get(name, ())
    assert_transparent(make(), make_batch(), forward, granularity=granularity, without_gradient=unused)


@pytest.mark.parametrize("name", MODELS)
def test_matches_the_exported_model(name):
    make, make_batch = MODELS[name]
    model = make()
    finer = to_layers(model, granularity="fine")
    assert_matches_export(model, to_layers(model), make_batch(), forward, finer)


@pytest.mark.parametrize("granularity", ["block", "fine"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, granularity):
    name, config, has, options = VARIANTS[variant]
    make, make_batch = MODELS[name]
    assert_transparent(
        make(**config),
        make_batch(**has),
        forward,
        ranks=(1,),
        without_gradient=UNUSED.get(name, ()) if variant != "flux of one kind" else LAST_TEXT_OF_FLUX,
        granularity=granularity,
        **options,
    )


# Without blocks of one stream, nothing reads the text that leaves the last block.
_UNREAD = ("attn.to_add_out", "attn.add_q_proj", "ff_context.net.0.proj", "ff_context.net.2")
LAST_TEXT_OF_FLUX = (
    *(f"transformer_blocks.1.{name}.{kind}" for name in _UNREAD for kind in ("weight", "bias")),
    "transformer_blocks.1.attn.norm_added_q.weight",
)


def test_frames_that_are_replaced():
    model = small.small_hunyuan_video(image_condition_type="token_replace")
    layers = assert_transparent(model, small.hunyuan_video_batch(), forward, ranks=(1, 2))
    assert layers[0].stash == ("patches", "temb", "token_replace_emb")
    with pytest.raises(GraphError, match=r"'token_replace', whose blocks treat the first frame apart.*\"block\" only"):
        to_layers(model, granularity="fine")


@pytest.mark.parametrize("name", ["pixart", "hunyuan_video"])
def test_masks_are_read(name):
    make, make_batch = MODELS[name]
    options = {"encoder_attention_mask": True} if name == "pixart" else {}
    batch = make_batch(**({"masks": True} if name == "pixart" else {}))
    full = {**batch, "encoder_attention_mask": torch.ones(2, 5, dtype=torch.long)}
    layers = to_layers(make(), **options)
    assert not torch.equal(interpret(layers, batch), interpret(layers, full))


@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan_video"])
def test_the_rotary_table_is_made_once_a_microbatch_and_not_stashed(name):
    make, make_batch = MODELS[name]
    model, made = make(), []
    getattr(model, "rope" if name != "flux" else "pos_embed").register_forward_hook(lambda *_: made.append(1))
    layers, batch = copy.deepcopy(to_layers(model)), make_batch()
    interpret(layers, batch)
    assert len(made) == 1
    changed = {**batch, "img_ids": batch["img_ids"].clone()} if name == "flux" else batch
    interpret(layers, changed)
    assert len(made) == 2
    assert all("rotary" not in value for layer in layers for value in layer.stash)


def test_a_table_follows_its_ids_when_they_are_changed_in_place():
    layers, batch = to_layers(small.small_flux()), small.flux_batch()
    before = interpret(layers, batch)
    batch["img_ids"].mul_(3)
    assert not torch.equal(interpret(layers, batch), before)


def test_the_last_block_sends_no_text_on():
    for name in ("sd3", "flux", "hunyuan_video", "cogvideox"):
        make, make_batch = MODELS[name]
        for granularity in ("block", "fine"):
            layers = to_layers(make(), granularity=granularity)
            assert isinstance(interpret(layers[:-1], make_batch()), Tensor), (name, granularity)


def test_fine_layers():
    layers = to_layers(small.small_flux(), granularity="fine")
    assert [layer.name for layer in layers[1:6]] == [
        "transformer_blocks.0.attn",
        "transformer_blocks.0.ff",
        "transformer_blocks.1.attn",
        "transformer_blocks.1.ff",
        "single_transformer_blocks.0",
    ]
    assert layers[1].stash == layers[2].pop == ("transformer_blocks.0.modulation",)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_another_kind(name):
    model = MODELS[name][0]()
    blocks = model.get_submodule("blocks" if name == "wan" else "transformer_blocks")
    blocks[1] = nn.Identity()
    with pytest.raises(GraphError, match=r"blocks\.1 is a Identity, supported: \w+Block"):
        to_layers(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_part_that_no_layer_holds(name):
    model = MODELS[name][0]()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(GraphError, match=r"extra\.weight belongs to 0 layers, expected one"):
        to_layers(model)


def test_gated_attention():
    with pytest.raises(GraphError, match=r"config\.attention_type is 'gated', supported: 'default'"):
        to_layers(small.small_pixart(attention_type="gated"))


def test_pictures_for_a_model_that_takes_none():
    with pytest.raises(
        GraphError, match=r"encoder_hidden_states_image=True was asked for, but config\.image_dim is None"
    ):
        to_layers(small.small_wan(), encoder_hidden_states_image=True)
