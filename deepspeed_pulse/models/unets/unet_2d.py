"""``UNet2DConditionModel`` (Stable Diffusion 1.x, 2.x, SDXL, inpainting) and ``UNet2DModel`` as layer lists."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from diffusers import UNet2DConditionModel, UNet2DModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets import unet_2d_blocks as blocks
from diffusers.models.upsampling import Upsample2D
from torch import Tensor

from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets.tokens import TRANSFORMERS
from deepspeed_pulse.models.unets.walk import Layers, Walk, unknown_blocks, unknown_condition, unknown_values
from deepspeed_pulse.models.units import Origin, refuse

BLOCKS = {
    "down": (blocks.DownBlock2D, blocks.AttnDownBlock2D, blocks.CrossAttnDownBlock2D, blocks.ResnetDownsampleBlock2D),
    "mid": (blocks.UNetMidBlock2D, blocks.UNetMidBlock2DCrossAttn),
    "up": (blocks.UpBlock2D, blocks.AttnUpBlock2D, blocks.CrossAttnUpBlock2D, blocks.ResnetUpsampleBlock2D),
}
SAMPLERS = {"downsamplers": (Downsample2D, ResnetBlock2D), "upsamplers": (Upsample2D, ResnetBlock2D)}
IN_BLOCKS = (*chain(*BLOCKS.values()), *TRANSFORMERS)
TAKES_APART = (UNet2DConditionModel, UNet2DModel, *IN_BLOCKS)
CONFIG = {
    "addition_embed_type": (None, "text", "text_time"),
    "encoder_hid_dim_type": (None, "text_proj"),
    "attention_type": ("default",),
    "dual_cross_attention": (False,),
}
CLIP_TOKENS = 77
"""Tokens of a CLIP text encoder, whose output the U-Nets read."""


def to_layers(
    model: UNet2DConditionModel | UNet2DModel,
    origin: Origin,
    *,
    fine: bool,
    attention_mask: bool = False,
    encoder_attention_mask: bool = False,
    timestep_cond: bool = False,
    upsample_size: bool | None = None,
    controlnet: Any = None,
    conditioning_scale: float = 1.0,
) -> Layers:
    """The layers of a diffusers U-Net.

    The first layer's input is ``sample``. Batch entries that the layers pop: ``timestep``; ``class_labels`` when the
    model embeds classes; ``encoder_hidden_states`` when it has cross attention; ``added_cond_kwargs.text_embeds`` and
    ``added_cond_kwargs.time_ids`` for SDXL. All of this follows from the model's config. ``attention_mask``,
    ``encoder_attention_mask`` (1 = keep) and ``timestep_cond`` say that the batch has these optional entries too.
    ``granularity="fine"`` cuts every ``Transformer2DModel`` into entry, attention and MLP of each block, and exit; a
    ``UNet2DModel`` has none, so its lists are the same.

    ``upsample_size=True`` is for samples whose height or width is not divisible by the model's total downsampling: the
    down path then also stashes the size that each upsampler has to produce (two integers a level). The default takes it
    from ``model.config.sample_size``.

    ``controlnet`` is a ``ControlNetModel`` to train together with the U-Net, or while the U-Net is frozen; its layers
    stand between the U-Net's (see :mod:`.controlnet`), read ``controlnet_cond`` and scale what they add by
    ``conditioning_scale``.
    """
    entries = {"attention_mask": attention_mask, "encoder_attention_mask": encoder_attention_mask}
    asked = {**entries, "timestep_cond": timestep_cond, "upsample_size": upsample_size}
    found = [*problems(model, tuple(name for name, wanted in asked.items() if wanted))]
    if controlnet is None and conditioning_scale != 1.0:
        found.append(f"conditioning_scale={conditioning_scale} scales what a ControlNet adds: pass controlnet= too")
    refuse(model, found)
    options: dict[str, Any] = {
        "fine": fine,
        "upsample_size": upsample_size,
        "timestep_cond": timestep_cond,
        "masks": tuple(name for name, wanted in entries.items() if wanted),
    }
    if controlnet is None:
        return Walk(model, origin, **options).layers()
    from deepspeed_pulse.models.unets.controlnet import controlled_layers  # which imports this module

    return controlled_layers(model, origin, controlnet, conditioning_scale=conditioning_scale, **options)


def problems(model: Any, asked: tuple[str, ...] = ()) -> Iterator[str]:
    """Everything about the model, or asked for with it, that the layers cannot express."""
    yield from unknown_values(model.config, CONFIG)
    if isinstance(model, UNet2DModel):
        yield from (f"{name}=True was asked for, which UNet2DModel does not take" for name in asked)
    else:
        yield from unknown_condition(model, "timestep_cond" in asked)
    yield from unknown_blocks(model, **BLOCKS, **SAMPLERS)


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch: dict[str, Any] = {"sample": shapes.numbers(config.in_channels, *shapes.sides), "timestep": shapes.integers()}
    embeds_classes = shapes.model.class_embedding is not None
    if isinstance(shapes.model, UNet2DModel):
        return batch | ({"class_labels": shapes.integers()} if embeds_classes else {})
    width = config.encoder_hid_dim or config.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    batch["encoder_hidden_states"] = shapes.numbers(CLIP_TOKENS, width)
    if embeds_classes:
        batch["class_labels"] = classes(shapes)
    return batch | text_and_sizes(shapes)


def text_and_sizes(shapes: Shapes) -> dict[str, Any]:
    """What SDXL adds."""
    config = shapes.config
    if config.addition_embed_type != "text_time":
        return {}
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {"added_cond_kwargs": {"text_embeds": shapes.numbers(pooled), "time_ids": shapes.numbers(6)}}


def classes(shapes: Shapes) -> Tensor:
    """Of a model that embeds them."""
    kind = shapes.config.class_embed_type
    if kind in (None, "timestep"):
        return shapes.integers()
    if kind == "identity":
        return shapes.numbers(shapes.model.time_embedding.linear_2.out_features)
    return shapes.numbers(shapes.config.projection_class_embeddings_input_dim)
