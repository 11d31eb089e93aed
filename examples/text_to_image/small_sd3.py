"""A small Stable Diffusion 3 pipeline with random weights, to try train_sd3_lora.py without a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from images import Captioned
from small_pipeline import make_tokenizer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel

WIDTH = 32  # of each CLIP's text states


def make(folder: Path, entries: Sequence[Captioned], *, seed: int = 0) -> None:
    """Write the pipeline into ``folder``; its tokenizer knows the captions."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(folder / "tokenizer", [caption for entry in entries for caption in entry.captions])
    pipeline = StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=make_vae(),
        text_encoder=make_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=make_clip(tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=make_t5(tokenizer),
        tokenizer_3=tokenizer,
    )
    pipeline.save_pretrained(folder)


def make_transformer() -> SD3Transformer2DModel:
    """8 blocks; latents of 8 x 8."""
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=8,
        attention_head_dim=16,
        num_attention_heads=4,
        caption_projection_dim=64,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=16,
    )


def make_vae() -> AutoencoderKL:
    """Four channels at a quarter of the size, as the second version's was, with a shift as the third's."""
    return AutoencoderKL(
        sample_size=32,
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=8,
        latent_channels=4,
        shift_factor=0.06,
    )


def make_clip(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
            projection_dim=WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_t5(tokenizer: CLIPTokenizer) -> T5EncoderModel:
    config = T5Config(vocab_size=len(tokenizer), d_model=2 * WIDTH, d_ff=64, d_kv=16, num_layers=1, num_heads=4)
    return T5EncoderModel(config)
