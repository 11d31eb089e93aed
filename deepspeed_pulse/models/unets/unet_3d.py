"""``UNet3DConditionModel`` (text to video) as a layer list: every resnet and transformer has a temporal companion."""

from __future__ import annotations

from itertools import chain
from typing import Any

from diffusers import UNet3DConditionModel
from diffusers.models.resnet import TemporalConvLayer
from diffusers.models.transformers.transformer_temporal import TransformerTemporalModel
from diffusers.models.unets import unet_3d_blocks as blocks

from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets.tokens import TRANSFORMERS
from deepspeed_pulse.models.unets.unet_2d import CLIP_TOKENS
from deepspeed_pulse.models.unets.video import VideoWalk
from deepspeed_pulse.models.unets.walk import Layers, unknown_blocks, unknown_condition
from deepspeed_pulse.models.units import Origin, refuse

BLOCKS = {
    "down": (blocks.DownBlock3D, blocks.CrossAttnDownBlock3D),
    "mid": (blocks.UNetMidBlock3DCrossAttn,),
    "up": (blocks.UpBlock3D, blocks.CrossAttnUpBlock3D),
}
TAKES_APART = (UNet3DConditionModel, *chain(*BLOCKS.values()), *TRANSFORMERS, TransformerTemporalModel)
FRAMES = 16
"""Of a video where the config names no number."""


def to_layers(
    model: Any, origin: Origin, *, fine: bool, timestep_cond: bool = False, upsample_size: bool | None = None
) -> Layers:
    """The layers of a ``UNet3DConditionModel``.

    The first layer's input is ``sample``, ``(batch, channels, frames, height, width)``. Batch entries that the layers
    pop: ``timestep``, ``encoder_hidden_states``, and ``timestep_cond`` when the batch has it. (The model takes an
    ``attention_mask`` and ``class_labels`` too, and reads neither.)
    ``granularity="fine"`` and ``upsample_size`` as for ``UNet2DConditionModel``; so are temporal transformers cut.

    Raises :class:`GraphError` naming every part of the model that cannot be expressed.
    """
    temporal = {"temp_convs": (TemporalConvLayer,), "temp_attentions": (TransformerTemporalModel,)}
    of_blocks = unknown_blocks(model, **BLOCKS, **temporal)
    refuse(model, (*unknown_condition(model, timestep_cond), *of_blocks))
    return Unet3dWalk(model, origin, fine=fine, upsample_size=upsample_size, timestep_cond=timestep_cond).layers()


class Unet3dWalk(VideoWalk):
    """The first skip is stored behind a first temporal transformer."""

    followers = ("temp_convs", "attentions", "temp_attentions")

    def stem(self) -> Layers:
        return [*super().stem(), *self.part("transformer_in")]


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "sample": shapes.numbers(config.in_channels, FRAMES, *shapes.sides),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(CLIP_TOKENS, config.cross_attention_dim),
    }
