"""What training scripts hand transformers; where a config has no size, the one the model is published with."""

from __future__ import annotations

from typing import Any

from deepspeed_pulse.models.catalogue.example_shapes import Shapes

SD3_TOKENS = 77 + 256
"""Of CLIP and T5, one after the other."""

T5_TOKENS = {"PixArtTransformer2DModel": 300, "FluxTransformer2DModel": 512, "WanTransformer3DModel": 512}

LLAMA_TOKENS = 256
"""That HunyuanVideo reads."""

CLIP_PICTURE_TOKENS = 257
"""Of the first frame, in Wan's models from picture to video."""


def hunyuan_dit(shapes: Shapes) -> dict[str, Any]:
    config, (height, width) = shapes.config, shapes.sides
    num_patches = (height // config.patch_size) * (width // config.patch_size)
    batch: dict[str, Any] = {
        "hidden_states": shapes.numbers(config.in_channels, height, width),
        "timestep": shapes.numbers(),
        "encoder_hidden_states": shapes.numbers(config.text_len, config.cross_attention_dim),
        "text_embedding_mask": shapes.integers(config.text_len),
        "encoder_hidden_states_t5": shapes.numbers(config.text_len_t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": shapes.integers(config.text_len_t5),
        "image_rotary_emb": tuple(shapes.table(num_patches, config.attention_head_dim) for _ in ("cos", "sin")),
    }
    if config.use_style_cond_and_image_meta_size:
        batch |= {"image_meta_size": shapes.numbers(6), "style": shapes.integers()}
    return batch


def uvit(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch = {"sample": shapes.numbers(config.in_channels, *shapes.sides), "timestep": shapes.integers()}
    if config.num_classes is not None:
        batch["class_labels"] = shapes.integers()
    if config.text_dim is not None:
        batch["encoder_hidden_states"] = shapes.numbers(config.num_text_tokens, config.text_dim)
    return batch


def unidiffuser(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "latent_image_embeds": shapes.numbers(config.in_channels, *shapes.sides),
        "image_embeds": shapes.numbers(1, config.clip_img_dim),
        "prompt_embeds": shapes.numbers(config.num_text_tokens, config.text_dim),
        "timestep_img": shapes.integers(),
        "timestep_text": shapes.integers(),
    }


def sd3(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "hidden_states": shapes.numbers(config.in_channels, *shapes.sides),
        "encoder_hidden_states": shapes.numbers(SD3_TOKENS, config.joint_attention_dim),
        "pooled_projections": shapes.numbers(config.pooled_projection_dim),
        "timestep": shapes.integers(),
    }


def flux(shapes: Shapes) -> dict[str, Any]:
    """1024 x 1024: 64 x 64 packed patches."""
    config, num_tokens = shapes.config, T5_TOKENS["FluxTransformer2DModel"]
    batch = {
        "hidden_states": shapes.numbers(64 * 64, config.in_channels),
        "encoder_hidden_states": shapes.numbers(num_tokens, config.joint_attention_dim),
        "pooled_projections": shapes.numbers(config.pooled_projection_dim),
        "timestep": shapes.numbers(),
        "txt_ids": shapes.table(num_tokens, 3),
        "img_ids": shapes.table(64 * 64, 3),
    }
    return batch | ({"guidance": shapes.numbers()} if config.guidance_embeds else {})


def pixart(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch: dict[str, Any] = {
        "hidden_states": shapes.numbers(config.in_channels, *shapes.sides),
        "encoder_hidden_states": shapes.numbers(T5_TOKENS["PixArtTransformer2DModel"], config.caption_channels),
        "timestep": shapes.integers(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    if shapes.model.use_additional_conditions:
        batch["added_cond_kwargs"] = {"resolution": shapes.numbers(2), "aspect_ratio": shapes.numbers(1)}
    return batch


def wan(shapes: Shapes) -> dict[str, Any]:
    """81 frames of 480 x 832."""
    config = shapes.config
    batch = {
        "hidden_states": shapes.numbers(config.in_channels, 21, 60, 104),
        "encoder_hidden_states": shapes.numbers(T5_TOKENS["WanTransformer3DModel"], config.text_dim),
        "timestep": shapes.integers(),
    }
    if config.image_dim is not None:
        batch["encoder_hidden_states_image"] = shapes.numbers(CLIP_PICTURE_TOKENS, config.image_dim)
    return batch


def hunyuan_video(shapes: Shapes) -> dict[str, Any]:
    """129 frames of 720 x 1280."""
    config = shapes.config
    batch = {
        "hidden_states": shapes.numbers(config.in_channels, 33, 90, 160),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(LLAMA_TOKENS, config.text_embed_dim),
        "encoder_attention_mask": shapes.integers(LLAMA_TOKENS),
        "pooled_projections": shapes.numbers(config.pooled_projection_dim),
    }
    return batch | ({"guidance": shapes.numbers()} if config.guidance_embeds else {})


def cogvideox(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    depth = config.patch_size_t or 1
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    frames += -frames % depth
    height, width = config.sample_height, config.sample_width
    batch: dict[str, Any] = {
        "hidden_states": shapes.numbers(frames, config.in_channels, height, width),
        "encoder_hidden_states": shapes.numbers(config.max_text_seq_length, config.text_embed_dim),
        "timestep": shapes.integers(),
    }
    if config.ofs_embed_dim is not None:
        batch["ofs"] = shapes.numbers()
    if config.use_rotary_positional_embeddings:
        num_patches = frames // depth * (height // config.patch_size) * (width // config.patch_size)
        batch["image_rotary_emb"] = tuple(shapes.table(num_patches, config.attention_head_dim) for _ in ("cos", "sin"))
    return batch
