"""A batch for a model, by the sizes in its config: what a training script would hand it, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import ConfigError, GraphError

CLIP_TOKENS = 77
"""Tokens of a CLIP text encoder, whose output the U-Nets read."""

FRAMES = 16
"""Frames of a video where the config names no number."""

SOUND_TOKENS = 8
"""Of the language model that AudioLDM2 reads beside its text encoder."""


class Shapes:
    """Makes meta tensors of a microbatch size and dtype, with a look at the model's config."""

    def __init__(self, model: Any, microbatch_size: int, dtype: torch.dtype) -> None:
        self.model, self.config = model, model.config
        self._microbatch_size, self._dtype = microbatch_size, dtype

    def numbers(self, *shape: int, rows: int = 1) -> Tensor:
        """``rows`` for each sample."""
        return torch.empty(rows * self._microbatch_size, *shape, dtype=self._dtype, device="meta")

    def integers(self, *shape: int) -> Tensor:
        return torch.empty(self._microbatch_size, *shape, dtype=torch.long, device="meta")

    def table(self, *shape: int) -> Tensor:
        """Numbers that all samples share."""
        return torch.empty(*shape, dtype=self._dtype, device="meta")

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of a sample."""
        size = self.config.sample_size
        if size is None:
            raise ConfigError(
                f"config of {type(self.model).__name__}: sample_size is null, so the size of an example is unknown; "
                "set it in config.json"
            )
        return (size, size) if isinstance(size, int) else tuple(size)


def example_batch(model: nn.Module, *, microbatch_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the model's ``forward``; the first is the first layer's input.

    Raises :class:`GraphError` for a model whose arguments are not known here.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in EXAMPLES:
            return EXAMPLES[kind.__name__](Shapes(model, microbatch_size, dtype))
    raise GraphError(
        f"no example batch is known for {type(model).__name__}, only for {', '.join(EXAMPLES)}; "
        "write a function that returns a layer list and an example batch and give it as package.module:function"
    )


def _unet_2d(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch = {"sample": shapes.numbers(config.in_channels, *shapes.sides), "timestep": shapes.integers()}
    if shapes.model.class_embedding is not None:
        batch["class_labels"] = shapes.integers()
    return batch


def _unet_2d_condition(shapes: Shapes) -> dict[str, Any]:
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


def _stable_video(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    added = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    return {
        "sample": shapes.numbers(config.num_frames, config.in_channels, *shapes.sides),
        "timestep": shapes.numbers(),
        "encoder_hidden_states": shapes.numbers(1, config.cross_attention_dim),
        "added_time_ids": shapes.numbers(added),
    }


def _unet_3d(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "sample": shapes.numbers(config.in_channels, FRAMES, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(CLIP_TOKENS, config.cross_attention_dim),
    }


def _unet_motion(shapes: Shapes) -> dict[str, Any]:
    text = shapes.numbers(CLIP_TOKENS, shapes.config.cross_attention_dim, rows=FRAMES)
    return {**_unet_3d(shapes), "encoder_hidden_states": text, **_text_and_sizes(shapes)}


def _audioldm2(shapes: Shapes) -> dict[str, Any]:
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


def _hunyuan_dit(shapes: Shapes) -> dict[str, Any]:
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


def _uvit(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch = {"sample": shapes.numbers(config.in_channels, *shapes.sides), "timestep": shapes.integers()}
    if config.num_classes is not None:
        batch["class_labels"] = shapes.integers()
    if config.text_dim is not None:
        batch["encoder_hidden_states"] = shapes.numbers(config.num_text_tokens, config.text_dim)
    return batch


def _unidiffuser(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "latent_image_embeds": shapes.numbers(config.in_channels, *shapes.sides),
        "image_embeds": shapes.numbers(1, config.clip_img_dim),
        "prompt_embeds": shapes.numbers(config.num_text_tokens, config.text_dim),
        "timestep_img": shapes.integers(),
        "timestep_text": shapes.integers(),
    }


EXAMPLES: dict[str, Callable[[Shapes], dict[str, Any]]] = {
    "AudioLDM2UNet2DConditionModel": _audioldm2,
    "HunyuanDiT2DModel": _hunyuan_dit,
    "UViTModel": _uvit,
    "UniDiffuserModel": _unidiffuser,
    "UNet2DModel": _unet_2d,
    "UNet2DConditionModel": _unet_2d_condition,
    "UNet3DConditionModel": _unet_3d,
    "UNetMotionModel": _unet_motion,
    "UNetSpatioTemporalConditionModel": _stable_video,
}
"""Class of the model to the arguments of its ``forward``."""
