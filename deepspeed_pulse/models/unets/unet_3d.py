"""``UNet3DConditionModel`` (text to video) as a layer list: every resnet and transformer has a temporal companion."""

from __future__ import annotations

from itertools import chain
from typing import Any

from diffusers import UNet3DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D, TemporalConvLayer
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_temporal import TransformerTemporalModel
from diffusers.models.unets import unet_3d_blocks as blocks
from diffusers.models.upsampling import Upsample2D

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets.problems import unknown_blocks
from deepspeed_pulse.models.unets.unet_2d import CLIP_TOKENS
from deepspeed_pulse.models.unets.video_walk import VideoWalk
from deepspeed_pulse.models.unets.walk import Layers
from deepspeed_pulse.models.units import refuse

BLOCKS = {
    "down": (blocks.DownBlock3D, blocks.CrossAttnDownBlock3D),
    "mid": (blocks.UNetMidBlock3DCrossAttn,),
    "up": (blocks.UpBlock3D, blocks.CrossAttnUpBlock3D),
}
PARTS = {
    "resnets": (ResnetBlock2D,),
    "temp_convs": (TemporalConvLayer,),
    "attentions": (Transformer2DModel,),
    "temp_attentions": (TransformerTemporalModel,),
    "downsamplers": (Downsample2D,),
    "upsamplers": (Upsample2D,),
}

TAKES_APART = (
    UNet3DConditionModel,
    *chain(*BLOCKS.values()),
    Transformer2DModel,
    TransformerTemporalModel,
    BasicTransformerBlock,
)
FRAMES = 16
"""Of a video where the config names no number."""


def to_layers(
    model: Any, *, granularity: str = "block", timestep_cond: bool = False, upsample_size: bool | None = None
) -> list[Declared]:
    """The layer list of a ``UNet3DConditionModel``; modules and weights are the model's own.

    The first layer's input is ``sample``, ``(batch, channels, frames, height, width)``. Batch entries that the layers
    pop: ``timestep``, ``encoder_hidden_states``, and ``timestep_cond`` when the batch has it. (The model takes an
    ``attention_mask`` and ``class_labels`` too, and reads neither.)

    ``granularity="fine"`` and ``upsample_size`` as for ``UNet2DConditionModel``; temporal transformers are cut
    likewise.

    Raises :class:`GraphError` naming every part of the model that cannot be expressed.
    """
    refuse(model, unknown_blocks(model, **BLOCKS, parts=PARTS, plain_parts={}))
    walk = Unet3dWalk(model, granularity=granularity, upsample_size=upsample_size, timestep_cond=timestep_cond)
    return walk.layers()


class Unet3dWalk(VideoWalk):
    """The first skip is stored behind a first temporal transformer."""

    followers = ("temp_convs", "attentions", "temp_attentions")

    def stem(self) -> Layers:
        return [*super().stem(), *self.part("transformer_in")]


def example(shapes: Shapes) -> dict[str, Any]:
    """What training scripts hand the model."""
    config = shapes.config
    return {
        "sample": shapes.numbers(config.in_channels, FRAMES, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(CLIP_TOKENS, config.cross_attention_dim),
    }
