"""Encoders as layer lists give what the models give, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

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


# ------------------------------------------------------------------------------------ text encoders

PROMPTS = ["a cup of coffee", "two cats"]
TOKENS = 9


class Letters:
    """A tokenizer that knows words by their length; a text ends with 1, and padding is 0."""

    model_max_length = TOKENS
    added_tokens_encoder = ()

    def __call__(self, texts, padding, max_length=TOKENS, **_):
        rows = [[2 + len(word) for word in text.split()] + [1] for text in texts]
        length = max_length if padding == "max_length" else max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        return SimpleNamespace(input_ids=ids, attention_mask=(ids > 0).long())

    def tokenize(self, text, **_):
        return text.split()

    def batch_decode(self, ids):
        return [""]


def small_clip(kind=CLIPTextModel, seed=0, width=16):
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    ends = {"bos_token_id": 3, "eos_token_id": 1, "pad_token_id": 0}
    return kind(
        CLIPTextConfig(vocab_size=32, max_position_embeddings=TOKENS, projection_dim=12, **sizes, **ends)
    ).eval()


def small_t5():
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2)).eval()


def encoded(encoder, *, has_mask=False, **options):
    """What layers give for the prompts."""
    tokens = Letters()(PROMPTS, padding="max_length")
    (declared,) = text_encoder_layers(encoder, mask="mask" if has_mask else None, **options)
    assert declared.pop == (("mask",) if has_mask else ())
    return declared.layer(tokens.input_ids, *([tokens.attention_mask] if has_mask else []))


def pipeline_of(kind, **parts):
    """A pipeline that only encodes text."""
    absent = dict.fromkeys(("vae", "unet", "scheduler", "safety_checker", "feature_extractor", "transformer"))
    taken = {name: None for name in absent if name in kind.__init__.__code__.co_varnames}
    return kind(**taken, **parts)


@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_the_text_encoder_is_the_models(kind):
    encoder = small_clip(kind)
    expected = encoder(Letters()(PROMPTS, padding="max_length").input_ids).last_hidden_state
    assert torch.equal(encoded(encoder), expected)


@torch.no_grad()
@pytest.mark.parametrize("skipped", [None, 1, 2])
def test_clip_skip_is_stable_diffusions(skipped):
    encoder = small_clip()
    if not hasattr(encoder, "text_model"):
        encoder.text_model = SimpleNamespace(final_layer_norm=encoder.final_layer_norm)  # where diffusers looks for it
    pipeline = pipeline_of(
        StableDiffusionPipeline, tokenizer=Letters(), text_encoder=encoder, requires_safety_checker=False
    )
    expected, _ = pipeline.encode_prompt(PROMPTS, "cpu", 1, False, clip_skip=skipped)
    found = encoded(encoder) if skipped is None else encoded(encoder, layer=-(skipped + 1), final_norm=True)
    assert torch.equal(found, expected)
    assert skipped is None or not torch.equal(found, encoded(encoder, layer=-(skipped + 1)))


@torch.no_grad()
def test_both_encoders_of_sdxl():
    one, two = small_clip(), small_clip(CLIPTextModelWithProjection, seed=1, width=24)
    pipeline = pipeline_of(
        StableDiffusionXLPipeline, tokenizer=Letters(), tokenizer_2=Letters(), text_encoder=one, text_encoder_2=two
    )
    for skipped in (None, 1):
        expected, _, expected_pooled, _ = pipeline.encode_prompt(
            PROMPTS, device="cpu", do_classifier_free_guidance=False, clip_skip=skipped
        )
        layer = -2 - (skipped or 0)
        states, pooled = encoded(two, layer=layer, pooled=True)
        assert torch.equal(torch.cat([encoded(one, layer=layer), states], dim=-1), expected)
        assert torch.equal(pooled, expected_pooled)


@torch.no_grad()
def test_the_mask_of_pixart_and_what_flux_reads():
    t5, clip = small_t5(), small_clip()
    pixart = pipeline_of(PixArtAlphaPipeline, tokenizer=Letters(), text_encoder=t5)
    expected, *_ = pixart.encode_prompt(PROMPTS, False, device="cpu", max_sequence_length=TOKENS)
    assert torch.equal(encoded(t5, has_mask=True), expected)
    assert not torch.equal(encoded(t5), expected)
    flux = pipeline_of(FluxPipeline, tokenizer=Letters(), text_encoder=clip, tokenizer_2=Letters(), text_encoder_2=t5)
    expected, expected_pooled, _ = flux.encode_prompt(PROMPTS, PROMPTS, device="cpu", max_sequence_length=TOKENS)
    assert torch.equal(encoded(t5), expected)
    assert torch.equal(encoded(clip, pooled=True)[1], expected_pooled)


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        (small_clip, {"layer": 5}, r"layer=5: expected one of the 5 hidden states that CLIPTextModel gives"),
        (small_t5, {"pooled": True}, "T5EncoderModel gives neither text_embeds nor a pooler_output"),
        (small_t5, {"layer": -2, "final_norm": True}, "expected an encoder of CLIP's kind.* found T5EncoderModel"),
        (small_clip, {"final_norm": True}, "give layer=, too"),
    ],
)
def test_what_a_text_encoder_does_not_give(encoder, options, message):
    with pytest.raises(GraphError, match=message):
        encoded(encoder(), **options)
