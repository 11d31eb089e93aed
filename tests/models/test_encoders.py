"""Encoders as layer lists give what the models give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from deepspeed_pulse.engine.specs import unwrap
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.encoders import text_encoder_layers, vae_encoder_layers


def through(layers, inputs):
    with torch.no_grad():
        for layer in layers:
            inputs = unwrap(layer)(inputs)
    return inputs


def small_vae():
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
        layers_per_block=2,
    ).eval()


def test_the_vae_encoder_is_the_models():
    vae = small_vae()
    pixels = torch.randn(2, 3, 20, 28)
    with torch.no_grad():
        expected = vae.encode(pixels).latent_dist.parameters
    layers = vae_encoder_layers(vae)
    assert len(layers) == 1 + 2 * (6 + 2) + 2 + 1 + 1
    assert torch.equal(through(layers, pixels), expected)
    owned = {id(p) for layer in layers for p in unwrap(layer).parameters()}
    assert owned == {id(p) for p in [*vae.encoder.parameters(), *vae.quant_conv.parameters()]}


def forward_of_the_encoder(vae):
    vae.encoder.forward = lambda pixels: 2 * type(vae.encoder).forward(vae.encoder, pixels)


def resnet_of_another_class(vae):
    kind = type(vae.encoder.mid_block.resnets[0])
    changed = {"forward": lambda self, hidden, temb: hidden + 2 * kind.forward(self, hidden, temb)}
    vae.encoder.mid_block.resnets[0].__class__ = type("MyResnet", (kind,), changed)


def hook_on_a_resnet(vae):
    vae.encoder.down_blocks[1].resnets[0].register_forward_hook(lambda *_: None)


def an_encode_of_its_own(vae):
    vae.__class__ = type("MyVae", (AutoencoderKL,), {"_encode": lambda self, pixels: 2 * self.encoder(pixels)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forward_of_the_encoder, "the model itself has a forward set on the instance"),
        (resnet_of_another_class, r"mid_block\.resnets\.0 has a forward of its own \(MyResnet's\)"),
        (hook_on_a_resnet, r"down_blocks\.1\.resnets\.0 has forward hooks, and no layer calls it"),
        (an_encode_of_its_own, r"the model itself has a _encode of its own \(MyVae's\)"),
        (AutoencoderKL.enable_tiling, r"call vae\.disable_tiling\(\)"),
    ],
)
def test_changes_that_no_layer_would_see(change, message):
    vae = small_vae()
    change(vae)
    with pytest.raises(GraphError, match=message):
        vae_encoder_layers(vae)


def test_another_kind_of_vae():
    with pytest.raises(GraphError, match=r"vae_encoder_layers\(\) takes an AutoencoderKL, found Linear"):
        vae_encoder_layers(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_the_text_encoder_is_the_models(kind):
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    encoder = kind(config).eval()
    ids = torch.randint(99, (2, 7))
    with torch.no_grad():
        expected = encoder(ids).last_hidden_state
    assert torch.equal(through(text_encoder_layers(encoder), ids), expected)
