"""Example batches of diffusers classes without a family, by the sizes of their config, for ``ds_pulse profile``.

Where a config names no size, pictures are of 1024 x 1024 pixels, and videos as long as the published model makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed_pulse.models.shapes import Shapes

Batch = dict[str, Any]
_TOKENS = 64 * 64
"""Of a picture: each is 16 x 16 pixels."""


def _qwen_image(shapes: Shapes) -> Batch:
    return {
        "hidden_states": shapes.numbers(_TOKENS, shapes.config.in_channels),
        "encoder_hidden_states": shapes.numbers(512, shapes.config.joint_attention_dim),
        "timestep": shapes.numbers(),
        "img_shapes": [[(1, 64, 64)]] * shapes.samples,
    }


def _flux(shapes: Shapes, axes: int) -> Batch:
    return {
        "hidden_states": shapes.numbers(_TOKENS, shapes.config.in_channels),
        "encoder_hidden_states": shapes.numbers(512, shapes.config.joint_attention_dim),
        "timestep": shapes.numbers(),
        "img_ids": shapes.table(_TOKENS, axes),
        "txt_ids": shapes.table(512, axes),
    }


def _chroma(shapes: Shapes) -> Batch:
    return _flux(shapes, 3)


def _flux2(shapes: Shapes) -> Batch:
    guidance = {"guidance": shapes.numbers()} if shapes.config.guidance_embeds else {}
    return {**_flux(shapes, 4), **guidance}


def _sana(shapes: Shapes) -> Batch:
    return {
        "hidden_states": shapes.numbers(shapes.config.in_channels, *shapes.sides),
        "encoder_hidden_states": shapes.numbers(300, shapes.config.caption_channels),
        "encoder_attention_mask": shapes.integers(300),
        "timestep": shapes.integers(),
    }


def _cogview4(shapes: Shapes) -> Batch:
    return {
        "hidden_states": shapes.numbers(shapes.config.in_channels, *shapes.sides),
        "encoder_hidden_states": shapes.numbers(1024, shapes.config.text_embed_dim),
        "timestep": shapes.integers(),
        **{name: shapes.numbers(2) for name in ("original_size", "target_size", "crop_coords")},
    }


def _ltx(shapes: Shapes) -> Batch:
    """161 frames of 512 x 704: eight frames and 32 x 32 pixels a token."""
    frames, height, width = 21, 16, 22
    return {
        "hidden_states": shapes.numbers(frames * height * width, shapes.config.in_channels),
        "encoder_hidden_states": shapes.numbers(128, shapes.config.caption_channels),
        "timestep": shapes.integers(),
        "encoder_attention_mask": shapes.integers(128),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


EXAMPLES: dict[str, Callable[[Shapes], Batch]] = {
    "ChromaTransformer2DModel": _chroma,
    "CogView4Transformer2DModel": _cogview4,
    "Flux2Transformer2DModel": _flux2,
    "LTXVideoTransformer3DModel": _ltx,
    "QwenImageTransformer2DModel": _qwen_image,
    "SanaTransformer2DModel": _sana,
}
"""Class to what makes a batch, on the meta device; the first entry is the first layer's input."""
