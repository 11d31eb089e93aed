"""Encoders as layer lists give what the models give, bit for bit."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel

from deepspeed_pulse.engine.specs import unwrap
from deepspeed_pulse.models.encoders import text_encoder_layers, vae_encoder_layers


def through(layers, inputs):
    with torch.no_grad():
        for layer in layers:
            inputs = unwrap(layer)(inputs)
    return inputs


def test_the_vae_encoder_is_the_models():
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
        layers_per_block=2,
    ).eval()
    pixels = torch.randn(2, 3, 20, 28)
    with torch.no_grad():
        expected = vae.encode(pixels).latent_dist.parameters
    layers = vae_encoder_layers(vae)
    assert len(layers) == 1 + 2 * (6 + 2) + 2 + 1 + 1
    assert torch.equal(through(layers, pixels), expected)
    owned = {id(p) for layer in layers for p in unwrap(layer).parameters()}
    assert owned == {id(p) for p in [*vae.encoder.parameters(), *vae.quant_conv.parameters()]}


def test_the_text_encoder_is_the_models():
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    encoder = CLIPTextModel(config).eval()
    ids = torch.randint(99, (2, 7))
    with torch.no_grad():
        expected = encoder(ids)[0]
    assert torch.equal(through(text_encoder_layers(encoder), ids), expected)
