"""``UNetMotionModel`` (AnimateDiff) as a layer list: a motion module follows every resnet and its transformer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from diffusers import UNetMotionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets import unet_motion_model as blocks
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2DCrossAttn
from diffusers.models.upsampling import Upsample2D
from torch import nn

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets import unet_3d
from deepspeed_pulse.models.unets.problems import unknown_blocks, unknown_values
from deepspeed_pulse.models.unets.unet_2d import CLIP_TOKENS, text_and_sizes
from deepspeed_pulse.models.unets.video_units import Temporal
from deepspeed_pulse.models.unets.video_walk import VideoWalk
from deepspeed_pulse.models.unets.walk import Layers
from deepspeed_pulse.models.units import refuse

BLOCKS = {
    "down": (blocks.DownBlockMotion, blocks.CrossAttnDownBlockMotion),
    "mid": (blocks.UNetMidBlockCrossAttnMotion, UNetMidBlock2DCrossAttn),
    "up": (blocks.UpBlockMotion, blocks.CrossAttnUpBlockMotion),
}
PARTS = {
    "resnets": (ResnetBlock2D,),
    "attentions": (Transformer2DModel,),
    "motion_modules": (blocks.AnimateDiffTransformer3D,),
    "downsamplers": (Downsample2D,),
    "upsamplers": (Upsample2D,),
}
CONFIG = {"addition_embed_type": (None, "text_time"), "encoder_hid_dim_type": (None,)}

TAKES_APART = (
    UNetMotionModel,
    *chain(*BLOCKS.values()),
    Transformer2DModel,
    blocks.AnimateDiffTransformer3D,
    BasicTransformerBlock,
)


def to_layers(
    model: Any, *, granularity: str = "block", timestep_cond: bool = False, upsample_size: bool | None = None
) -> list[Declared]:
    """The layer list of a ``UNetMotionModel``; modules and weights are the model's own.

    The first layer's input is ``sample``, ``(batch, channels, frames, height, width)``. Batch entries that the layers
    pop: ``timestep``, ``encoder_hidden_states`` (a row for each frame, as the model takes it, or for each sample),
    ``added_cond_kwargs.text_embeds`` and ``added_cond_kwargs.time_ids`` for SDXL's, and ``timestep_cond`` when the
    batch has it. (A mask of pixels, ``attention_mask``, is not supported.)

    ``granularity="fine"`` and ``upsample_size`` as for ``UNet2DConditionModel``; motion modules are cut likewise.

    Raises :class:`GraphError` naming every part of the model that cannot be expressed.
    """
    problems = [
        *unknown_values(model.config, CONFIG),
        *unknown_blocks(model, **BLOCKS, parts=PARTS, plain_parts={}),
    ]
    refuse(model, problems)
    walk = UnetMotionWalk(model, granularity=granularity, upsample_size=upsample_size, timestep_cond=timestep_cond)
    return walk.layers()


class UnetMotionWalk(VideoWalk):
    """Motion modules are transformers over the frames."""

    followers = ("attentions", "motion_modules")

    def kinds(self) -> dict[type[nn.Module], Callable[[str], Layers]]:
        motion = {blocks.AnimateDiffTransformer3D: lambda path: self.over_frames(Temporal, path)}
        return {**super().kinds(), **motion}


def example(shapes: Shapes) -> dict[str, Any]:
    """What training scripts hand the model."""
    text = shapes.numbers(CLIP_TOKENS, shapes.config.cross_attention_dim, rows=unet_3d.FRAMES)
    return {**unet_3d.example(shapes), "encoder_hidden_states": text, **text_and_sizes(shapes)}
