"""A layer list computes what the model computes, bit for bit, with the model's own weights."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from support.small_models import (
    interpret,
    pixel_entries,
    sd_entries,
    sdxl_entries,
    small_sd_unet,
    small_sdxl_unet,
    small_unet,
)
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import describe
from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.models import to_layers


def forward(model: nn.Module, entries: dict[str, Tensor]) -> Tensor:
    """The model's own forward, with SDXL's added conditions where diffusers wants them."""
    entries = dict(entries)
    added = {name: entries.pop(name) for name in ("text_embeds", "time_ids") if name in entries}
    if isinstance(model, UNet2DConditionModel):
        entries["added_cond_kwargs"] = added
        entries.setdefault("encoder_hidden_states", None)
    return model(**entries, return_dict=False)[0]


def assert_same(model: nn.Module, entries: dict[str, Tensor], **options: Any) -> list[Any]:
    """Forward and every gradient, with respect to parameters and the sample, are equal bit for bit."""
    reference = copy.deepcopy(model)
    layers = to_layers(model, **options)
    results = []
    for run in (lambda given: forward(reference, given), lambda given: interpret(layers, given)):
        sample = entries["sample"].clone().requires_grad_()
        output = run({**entries, "sample": sample})
        (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
        results.append((output.detach(), sample.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
        else:
            assert torch.equal(parameter.grad, expected[name]), name
            assert expected[name].any(), f"{name}: a zero gradient proves nothing"
    Graph(layers=tuple(describe(index, layer) for index, layer in enumerate(layers)))
    return layers


def skips_of(layers: list[Any]) -> list[str]:
    return [name for layer in layers for name in layer.stash if name.startswith("skip")]


def test_stable_diffusion():
    layers = assert_same(small_sd_unet(), sd_entries())
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


def test_sdxl():
    layers = assert_same(small_sdxl_unet(), sdxl_entries())
    assert (len(layers), len(skips_of(layers))) == (34, 9)
    assert layers[0].pop == ("timestep", "text_embeds", "time_ids")


def test_pixel_unet_with_classes():
    layers = assert_same(small_unet(), pixel_entries())
    assert (len(layers), len(skips_of(layers))) == (24, 6)
    assert layers[0].pop == ("timestep", "class_labels")


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
    ],
    ids=lambda config: next(iter(config)),
)
def test_conditional_unet_variants(config):
    assert_same(small_sd_unet(**config), sd_entries())


def test_projected_text_travels_with_its_gradient():
    layers = assert_same(small_sd_unet(encoder_hid_dim=32), sd_entries())
    assert layers[0].stash == ("skip0", "temb", "text_states")
    assert all("encoder_hidden_states" not in layer.pop for layer in layers[1:])


def test_masks_and_distilled_guidance():
    mask = torch.ones(2, 7)
    mask[0, 4:] = 0
    entries = {**sd_entries(), "encoder_attention_mask": mask, "timestep_cond": torch.randn(2, 6)}
    layers = assert_same(small_sd_unet(time_cond_proj_dim=6), entries, encoder_attention_mask=True, timestep_cond=True)
    without = interpret(to_layers(small_sd_unet()), sd_entries())
    assert not torch.equal(without, interpret(layers, entries))


def test_one_timestep_for_all_samples():
    assert_same(small_sd_unet(), {**sd_entries(), "timestep": torch.tensor(7)})


@pytest.mark.parametrize("size", [(15, 18), (16, 16), (9, 23)])
def test_any_size_of_latent(size):
    layers = assert_same(small_sd_unet(), sd_entries(size=size), upsample_size=True)
    sizes = [name for layer in layers for name in layer.stash if name.startswith("size")]
    assert sizes == ["size2", "size5", "size8"]


def test_odd_sample_size_in_the_config_is_noticed():
    assert_same(small_sd_unet(sample_size=(18, 16)), sd_entries(size=(18, 16)))


def test_odd_latent_without_sizes_is_an_error_that_names_the_option():
    with pytest.raises(BatchError, match=r"up_blocks\.1\.resnets\.0.* is 4x4, its skip 3x4.*upsample_size=True"):
        interpret(to_layers(small_sd_unet()), sd_entries(size=(10, 16)))


@pytest.mark.parametrize("make", [small_sd_unet, small_sdxl_unet, small_unet])
def test_every_parameter_belongs_to_exactly_one_layer_and_is_not_a_copy(make):
    model = make()
    layers = to_layers(model)
    owners = Counter(id(parameter) for layer in layers for parameter in layer.layer.parameters())
    assert owners == {id(parameter): 1 for parameter in model.parameters()}


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


def test_gradient_checkpointing_of_the_model_is_kept():
    model = small_sd_unet()
    kept = saved_bytes(to_layers(model))
    model.enable_gradient_checkpointing()
    assert saved_bytes(assert_same(model, sd_entries())) < 0.5 * kept


def saved_bytes(layers: list[Any]) -> int:
    """Bytes of activations that a forward keeps for backward."""
    parameters = {parameter.data_ptr() for layer in layers for parameter in layer.layer.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = interpret(layers, sd_entries())
    assert output.requires_grad
    return sum(saved.values())


# ------------------------------------------------------------------------------------------ refusals


def test_unknown_model_class():
    with pytest.raises(GraphError, match=r"UNet2DConditionModel, UNet2DModel, found Linear.*spec\(module"):
        to_layers(nn.Linear(2, 2))


def test_freeu():
    model = small_sd_unet()
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    with pytest.raises(GraphError, match=r"up_blocks\.0 has FreeU enabled; call model\.disable_freeu"):
        to_layers(model)
    model.disable_freeu()
    to_layers(model)


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


def test_timestep_cond_needs_a_model_that_takes_it():
    with pytest.raises(GraphError, match="time_cond_proj_dim is None"):
        to_layers(small_sd_unet(), timestep_cond=True)


def test_a_part_that_no_layer_holds():
    model = small_unet()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(GraphError, match=r"extra\.weight belongs to 0 layers, expected one"):
        to_layers(model)
