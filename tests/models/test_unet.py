"""A layer list computes what the model computes, bit for bit, with the model's own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from support.families import assert_matches_export, assert_transparent, interpret
from support.small_models import (
    pixel_entries,
    sd_entries,
    sdxl_entries,
    small_audioldm2,
    small_motion_unet,
    small_sd_unet,
    small_sdxl_unet,
    small_unet,
    small_unet_3d,
)
from torch import Tensor, nn

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.models import to_layers


def forward(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The model's own forward."""
    if isinstance(model, UNet2DConditionModel):
        batch = {"encoder_hidden_states": None, **batch}
    return model(**batch, return_dict=False)[0]


def assert_same(model: nn.Module, batch: dict[str, Any], **options: Any) -> list[Any]:
    """Bit for bit on one rank: enough for variants of a model that another test spreads over ranks."""
    return assert_transparent(model, batch, forward, ranks=(1,), **options)


def skips_of(layers: list[Any]) -> list[str]:
    return [name for layer in layers for name in layer.stash if name.startswith("skip")]


def test_stable_diffusion():
    layers = assert_transparent(small_sd_unet(), sd_entries(), forward)
    assert len(layers) == 46
    assert skips_of(layers) == [f"skip{index}" for index in range(12)]
    assert [layer.name for layer in layers[:4]] == [
        "conv_in",
        "down_blocks.0.resnets.0",
        "down_blocks.0.attentions.0",
        "down_blocks.0.resnets.1",
    ]
    assert layers[0].pop == ("timestep",)
    assert layers[0].stash == ("skip0", "temb")
    assert layers[-1].name == "conv_out"


def test_skips_nest_strictly():
    stack = []
    for layer in to_layers(small_sd_unet()):
        for name in (name for name in layer.pop if name.startswith("skip")):
            assert stack.pop() == name
        stack += [name for name in layer.stash if name.startswith("skip")]
    assert not stack


def test_transformers_cut_further():
    """A named value for each residual; blocks and exit read nothing but what they need."""
    layers = assert_transparent(small_sdxl_unet(), sdxl_entries(), forward, granularity="fine")
    names = [layer.name for layer in layers]
    assert (len(layers), len(skips_of(layers))) == (101, 9)
    first = names.index("down_blocks.1.attentions.0.entry")
    assert names[first : first + 6] == [
        f"down_blocks.1.attentions.0.{part}"
        for part in (
            "entry",
            *(f"transformer_blocks.{i}.{name}" for i in (0, 1) for name in ("attention", "mlp")),
            "exit",
        )
    ]
    assert layers[first].stash == layers[first + 5].pop == ("down_blocks.1.attentions.0.residual",)
    assert layers[first + 5].stash == ("skip4",)
    assert [layers[first + i].pop for i in (1, 2)] == [("encoder_hidden_states",), ()]


def test_sdxl():
    model, batch = small_sdxl_unet(), sdxl_entries()
    layers = assert_transparent(model, batch, forward)
    assert (len(layers), len(skips_of(layers))) == (34, 9)
    assert layers[0].pop == ("timestep", "added_cond_kwargs.text_embeds", "added_cond_kwargs.time_ids")
    assert_matches_export(model, layers, batch, forward, to_layers(model, granularity="fine"))


def test_pixel_unet_with_classes():
    model, batch = small_unet(), pixel_entries()
    layers = assert_transparent(model, batch, forward)
    assert (len(layers), len(skips_of(layers))) == (24, 6)
    assert layers[0].pop == ("timestep", "class_labels")
    assert_matches_export(model, layers, batch, forward)
    assert [layer.name for layer in to_layers(model, granularity="fine")] == [layer.name for layer in layers]


@pytest.mark.parametrize(
    "config",
    [
        {"resnet_time_scale_shift": "scale_shift"},
        {"downsample_type": "resnet", "upsample_type": "resnet"},
        {"time_embedding_type": "learned", "num_train_timesteps": 1000},
        {"time_embedding_type": "fourier"},
        {"class_embed_type": "timestep", "num_class_embeds": None},
        {"center_input_sample": True},
        {"add_attention": False},
        {"mid_block_type": None},
        {
            "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D"),
        },
    ],
    ids=lambda config: next(iter(config)),
)
def test_pixel_unet_variants(config):
    assert_same(small_unet(**config), pixel_entries())


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({"num_class_embeds": 5}, torch.tensor([1, 4])),
        ({"class_embed_type": "timestep"}, torch.tensor([10, 700])),
        ({"class_embed_type": "identity"}, torch.randn(2, 128)),
        ({"class_embed_type": "projection", "projection_class_embeddings_input_dim": 9}, torch.randn(2, 9)),
        (
            {"class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": 9}
            | {"class_embeddings_concat": True},
            torch.randn(2, 9),
        ),
    ],
    ids=["table", "timestep", "identity", "projection", "concatenated"],
)
def test_class_embeddings(config, labels):
    layers = assert_same(small_sd_unet(**config), {**sd_entries(), "class_labels": labels})
    assert "class_labels" in layers[0].pop


@pytest.mark.parametrize(
    "config",
    [
        {"time_embedding_act_fn": "silu", "timestep_post_act": "silu"},
        {"resnet_time_scale_shift": "scale_shift"},
        {"encoder_hid_dim": 32},
        {"addition_embed_type": "text", "encoder_hid_dim": 32, "addition_embed_type_num_heads": 4},
        {"layers_per_block": (1, 2, 1, 2)},
        {"only_cross_attention": True},
        {"use_linear_projection": True},
        {"down_block_types": ("AttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")},
        {"mid_block_type": None},
    ],
    ids=lambda config: next(iter(config)),
)
@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_conditional_unet_variants(config, granularity):
    assert_same(small_sd_unet(**config), sd_entries(), granularity=granularity)


def test_inpainting():
    batch = sd_entries()
    noisy, masked = batch["sample"], batch["sample"].flip(0)
    batch["sample"] = torch.cat([noisy, (noisy[:, :1] > 0).float(), masked], dim=1)
    assert_same(small_sd_unet(in_channels=9), batch)


def test_projected_text_travels_with_its_gradient():
    layers = assert_same(small_sd_unet(encoder_hid_dim=32), sd_entries())
    assert layers[0].stash == ("skip0", "temb", "text_states")
    assert all("encoder_hidden_states" not in layer.pop for layer in layers[1:])


@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_masks_and_distilled_guidance(granularity):
    """Masks of any dtype; distilled models read a guidance embedding."""
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    batch = {**sd_entries(), "encoder_attention_mask": mask, "timestep_cond": torch.randn(2, 6)}
    model = small_sd_unet(time_cond_proj_dim=6)
    layers = assert_same(model, batch, encoder_attention_mask=True, timestep_cond=True, granularity=granularity)
    without = interpret(to_layers(small_sd_unet()), sd_entries())
    assert not torch.equal(without, interpret(layers, batch))


def test_masked_pixels():
    """Such a mask fits one resolution only, where attention runs at one level."""
    mask = torch.ones(2, 64)
    mask[1, 9:] = 0
    config = {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    for granularity in ("block", "fine"):
        model, batch = small_sd_unet(**config), {**sd_entries(), "attention_mask": mask}
        assert_same(model, batch, attention_mask=True, granularity=granularity)


def test_one_timestep_for_all_samples():
    assert_same(small_sd_unet(), {**sd_entries(), "timestep": torch.tensor(7)})


@pytest.mark.parametrize("size", [(15, 18), (16, 16), (9, 23)])
def test_any_size_of_latent(size):
    ranks = (1, 2, 4) if size == (9, 23) else (1,)
    layers = assert_transparent(small_sd_unet(), sd_entries(size=size), forward, ranks=ranks, upsample_size=True)
    sizes = [name for layer in layers for name in layer.stash if name.startswith("size")]
    assert sizes == ["size2", "size5", "size8"]


def test_odd_sample_size_in_the_config_is_noticed():
    assert_same(small_sd_unet(sample_size=(18, 16)), sd_entries(size=(18, 16)))


def test_odd_latent_without_sizes_is_an_error_that_names_the_option():
    with pytest.raises(BatchError, match=r"up_blocks\.1\.resnets\.0.* is 4x4, its skip 3x4.*upsample_size=True"):
        interpret(to_layers(small_sd_unet()), sd_entries(size=(10, 16)))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (small_unet, {}),
        (
            lambda: small_sd_unet(up_block_types=("AttnUpBlock2D",) + ("CrossAttnUpBlock2D",) * 3),
            {"upsample_size": True},
        ),
    ],
    ids=["UNet2DModel", "blocks that only double"],
)
def test_no_option_is_named_where_none_helps(make, options):
    model, batch = make(), pixel_entries() if make is small_unet else sd_entries()
    batch["sample"] = batch["sample"][..., :10, :]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        forward(model, batch)
    with pytest.raises(BatchError, match=r"its skip .*this model takes no other sizes$"):
        interpret(to_layers(model, **options), batch)


def test_layers_keep_the_names_of_the_models_state_dict():
    model = small_sd_unet()
    layers = to_layers(model)
    merged = {key: value for layer in layers for key, value in layer.layer.state_dict().items()}
    assert merged.keys() == model.state_dict().keys()
    assert "down_blocks.0.resnets.1.conv1.weight" in layers[3].layer.state_dict()


def test_every_layer_knows_the_model():
    for layer in to_layers(small_unet()):
        assert layer.layer.origin.model_class is UNet2DModel
        assert '"num_class_embeds": 5' in layer.layer.origin.config_json


def test_repr_names_the_parts():
    layers = {layer.name: layer.layer for layer in to_layers(small_unet())}
    assert "mid_block.attentions.0" in repr(layers["mid_block.attentions.0"])


def test_gradient_checkpointing_of_blocks_is_bypassed_and_said_so():
    model = small_sd_unet()
    model.enable_gradient_checkpointing()
    with pytest.warns(UserWarning, match=r"bypassed. Call model\.disable_gradient_checkpointing\(\)"):
        to_layers(model)
    model.disable_gradient_checkpointing()
    to_layers(model)


# ------------------------------------------------------------------------------------------ refusals


def test_unknown_model_class():
    with pytest.raises(GraphError, match=r"knows no family for Linear, so it traces .*: pass example_batch="):
        to_layers(nn.Linear(2, 2))


def test_freeu():
    model = small_sd_unet()
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    with pytest.raises(GraphError, match=r"up_blocks\.0 has FreeU enabled; call model\.disable_freeu"):
        to_layers(model)
    model.disable_freeu()
    to_layers(model)


def test_other_switches_for_sampling():
    model = small_sd_unet()
    model.set_attention_slice(2)
    with pytest.raises(
        GraphError, match=r"attn1 runs in slices; call model\.set_default_attn_processor.*; so 32 modules"
    ):
        to_layers(model)
    model.set_default_attn_processor()
    model.fuse_qkv_projections()
    with pytest.raises(GraphError, match=r"has fused projections; call model\.unfuse_qkv_projections"):
        to_layers(model)
    model.unfuse_qkv_projections()
    to_layers(model)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cross_attention_kwargs", "layers pass none on"),
        ("down_block_additional_residuals", r"to_layers\(unet, controlnet=controlnet\)"),
        ("encoder_attention_masks", r'did you mean "encoder_attention_mask"'),
    ],
)
def test_what_layers_cannot_read_is_refused(name, hint):
    with pytest.raises(GraphError, match=rf"takes attention_mask, .*; found '{name}'.*{hint}"):
        to_layers(small_sd_unet(), **{name: True})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"addition_embed_type": "image", "encoder_hid_dim": 8},
            r"config\.addition_embed_type is 'image', supported: None, 'text', 'text_time'",
        ),
        (
            {"encoder_hid_dim_type": "image_proj", "encoder_hid_dim": 8},
            r"config\.encoder_hid_dim_type is 'image_proj', supported: None, 'text_proj'",
        ),
        ({"attention_type": "gated"}, r"config\.attention_type is 'gated', supported: 'default'"),
        ({"dual_cross_attention": True}, r"config\.dual_cross_attention is True.*\n.*DualTransformer2DModel"),
        (
            {"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"},
            r"mid_block is a UNetMidBlock2DSimpleCrossAttn, supported: UNetMidBlock2D, UNetMidBlock2DCrossAttn",
        ),
    ],
    ids=["addition", "image", "gated", "dual", "simple"],
)
def test_unsupported_configs_are_named(config, message):
    with pytest.raises(GraphError, match=message):
        to_layers(small_sd_unet(**config))


def test_all_problems_are_listed_at_once():
    model = small_unet(
        down_block_types=("DownBlock2D", "SkipDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "SkipUpBlock2D", "UpBlock2D"),
        norm_num_groups=32,
    )
    with pytest.raises(GraphError) as caught:
        to_layers(model, upsample_size=True)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "upsample_size=True was asked for, which UNet2DModel does not take",
        "down_blocks.1 is a SkipDownBlock2D, supported: DownBlock2D, AttnDownBlock2D, CrossAttnDownBlock2D, "
        "ResnetDownsampleBlock2D",
        "up_blocks.1 is a SkipUpBlock2D, supported: UpBlock2D, AttnUpBlock2D, CrossAttnUpBlock2D, "
        "ResnetUpsampleBlock2D",
    ]


def test_parts_of_another_kind_inside_a_known_block():
    model = small_unet()
    model.down_blocks[1].resnets[0] = nn.Linear(2, 2)
    model.mid_block.attentions[0].spatial_norm = nn.Identity()
    with pytest.raises(GraphError, match=r"down_blocks\.1\.resnets\.0 is a Linear, supported: ResnetBlock2D") as caught:
        to_layers(model)
    assert "mid_block.attentions.0 has a spatial norm" in str(caught.value)


@pytest.mark.parametrize("make", [small_sd_unet, small_unet_3d, small_motion_unet, small_audioldm2])
def test_timestep_cond_needs_a_model_that_takes_it(make):
    with pytest.raises(GraphError, match="time_cond_proj_dim is None"):
        to_layers(make(), timestep_cond=True)


def test_a_part_that_no_layer_holds():
    model = small_unet()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(GraphError, match=r"extra\.weight belongs to 0 layers, expected one"):
        to_layers(model)
