"""``UNetMotionModel`` (AnimateDiff) as a layer list: a motion module follows every resnet and its transformer."""

from __future__ import annotations

from itertools import chain
from typing import Any

from diffusers import UNetMotionModel
from diffusers.models.unets import unet_motion_model as blocks
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2DCrossAttn

from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets import unet_3d
from deepspeed_pulse.models.unets.tokens import TRANSFORMERS
from deepspeed_pulse.models.unets.unet_2d import CLIP_TOKENS, text_and_sizes
from deepspeed_pulse.models.unets.video import VideoWalk
from deepspeed_pulse.models.unets.walk import Layers, unknown_blocks, unknown_condition, unknown_values
from deepspeed_pulse.models.units import Origin, refuse

BLOCKS = {
    "down": (blocks.DownBlockMotion, blocks.CrossAttnDownBlockMotion),
    "mid": (blocks.UNetMidBlockCrossAttnMotion, UNetMidBlock2DCrossAttn),
    "up": (blocks.UpBlockMotion, blocks.CrossAttnUpBlockMotion),
}
CONFIG = {"addition_embed_type": (None, "text_time"), "encoder_hid_dim_type": (None,)}

TAKES_APART = (UNetMotionModel, *chain(*BLOCKS.values()), *TRANSFORMERS, blocks.AnimateDiffTransformer3D)


def to_layers(
    model: Any, origin: Origin, *, fine: bool, timestep_cond: bool = False, upsample_size: bool | None = None
) -> Layers:
    """The layers of a ``UNetMotionModel``.

    The first layer's input is ``sample``, ``(batch, channels, frames, height, width)``. Batch entries that the layers
    pop: ``timestep``, ``encoder_hidden_states`` (a row for each frame, as the model takes it, or for each sample),
    ``added_cond_kwargs.text_embeds`` and ``added_cond_kwargs.time_ids`` for SDXL's, and ``timestep_cond`` when the
    batch has it. (A mask of pixels, ``attention_mask``, is not supported.)
    ``granularity="fine"`` and ``upsample_size`` as for ``UNet2DConditionModel``; motion modules are cut likewise.

    Raises :class:`GraphError` naming every part of the model that cannot be expressed.
    """
    of_blocks = unknown_blocks(model, **BLOCKS, motion_modules=(blocks.AnimateDiffTransformer3D,))
    refuse(model, (*unknown_values(model.config, CONFIG), *unknown_condition(model, timestep_cond), *of_blocks))
    return UnetMotionWalk(model, origin, fine=fine, upsample_size=upsample_size, timestep_cond=timestep_cond).layers()


class UnetMotionWalk(VideoWalk):
    """Motion modules are transformers over the frames."""

    followers = ("attentions", "motion_modules")


def example(shapes: Shapes) -> dict[str, Any]:
    text = shapes.numbers(CLIP_TOKENS, shapes.config.cross_attention_dim, rows=unet_3d.FRAMES)
    return {**unet_3d.example(shapes), "encoder_hidden_states": text, **text_and_sizes(shapes)}
