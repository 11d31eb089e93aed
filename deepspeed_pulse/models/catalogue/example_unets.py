"""What training scripts hand U-Nets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed_pulse.models.catalogue.example_shapes import Shapes

CLIP_TOKENS = 77
"""Tokens of a CLIP text encoder, whose output the U-Nets read."""

FRAMES = 16
"""Frames of a video where the config names no number."""

SOUND_TOKENS = 8
"""Of the language model that AudioLDM2 reads beside its text encoder."""

KANDINSKY_TOKENS = 128


def unet_2d(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch = {"sample": shapes.numbers(config.in_channels, *shapes.sides), "timestep": shapes.integers()}
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = shapes.integers()
    return batch


def unet_2d_condition(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    width = config.encoder_hid_dim or config.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    batch: dict[str, Any] = {
        "sample": shapes.numbers(config.in_channels, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(CLIP_TOKENS, width),
    }
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = _classes(shapes)
    return batch | _text_and_sizes(shapes)


def _text_and_sizes(shapes: Shapes) -> dict[str, Any]:
    """What SDXL adds."""
    config = shapes.config
    if config.addition_embed_type != "text_time":
        return {}
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {"added_cond_kwargs": {"text_embeds": shapes.numbers(pooled), "time_ids": shapes.numbers(6)}}


def _classes(shapes: Shapes) -> Tensor:
    kind = shapes.config.class_embed_type
    if kind in (None, "timestep"):
        return shapes.integers()
    if kind == "identity":
        return shapes.numbers(shapes.model.time_embedding.linear_2.out_features)
    return shapes.numbers(shapes.config.projection_class_embeddings_input_dim)


def stable_video(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    added = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    return {
        "sample": shapes.numbers(config.num_frames, config.in_channels, *shapes.sides),
        "timestep": shapes.numbers(),
        "encoder_hidden_states": shapes.numbers(1, config.cross_attention_dim),
        "added_time_ids": shapes.numbers(added),
    }


def unet_3d(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "sample": shapes.numbers(config.in_channels, FRAMES, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(CLIP_TOKENS, config.cross_attention_dim),
    }


def unet_motion(shapes: Shapes) -> dict[str, Any]:
    text = shapes.numbers(CLIP_TOKENS, shapes.config.cross_attention_dim, rows=FRAMES)
    return {**unet_3d(shapes), "encoder_hidden_states": text, **_text_and_sizes(shapes)}


def audioldm2(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    widths = config.cross_attention_dim if isinstance(config.cross_attention_dim, int) else None
    texts = [widths] if widths else [width for width in config.cross_attention_dim[0] if width is not None]
    batch = {
        "sample": shapes.numbers(config.in_channels, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(SOUND_TOKENS, texts[0]),
        "encoder_hidden_states_1": shapes.numbers(CLIP_TOKENS, texts[-1]),
    }
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = _classes(shapes)
    return batch


def kandinsky3(shapes: Shapes) -> dict[str, Any]:
    """The config has no size; the model was made for 1024 x 1024."""
    return {
        "sample": shapes.numbers(shapes.config.in_channels, 128, 128),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(KANDINSKY_TOKENS, shapes.config.encoder_hid_dim),
        "encoder_attention_mask": shapes.integers(KANDINSKY_TOKENS),
    }
