"""``UNetSpatioTemporalConditionModel`` (Stable Video Diffusion) as a layer list.

Every resnet and transformer has a spatial half, a temporal half and a learned mix of both, all in one layer;
``granularity="fine"`` takes transformers apart.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from diffusers import UNetSpatioTemporalConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import SpatioTemporalResBlock
from diffusers.models.transformers.transformer_temporal import TransformerSpatioTemporalModel
from diffusers.models.unets import unet_3d_blocks as blocks
from torch import Tensor, nn

from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets.tokens import Entry, Exit
from deepspeed_pulse.models.unets.units import Part, SkipResnet
from deepspeed_pulse.models.unets.video import WITHIN_FRAMES, FrameHead, FrameStem, VideoWalk, per_frame
from deepspeed_pulse.models.unets.walk import Layers, unknown_blocks
from deepspeed_pulse.models.units import Origin, Unit, declare, refuse, same

BLOCKS = {
    "down": (blocks.DownBlockSpatioTemporal, blocks.CrossAttnDownBlockSpatioTemporal),
    "mid": (blocks.UNetMidBlockSpatioTemporal,),
    "up": (blocks.UpBlockSpatioTemporal, blocks.CrossAttnUpBlockSpatioTemporal),
}
TAKES_APART = (
    UNetSpatioTemporalConditionModel,
    *chain(*BLOCKS.values()),
    TransformerSpatioTemporalModel,
    BasicTransformerBlock,
)


def to_layers(model: Any, origin: Origin, *, fine: bool, upsample_size: bool | None = None) -> Layers:
    """The layers of a ``UNetSpatioTemporalConditionModel``.

    The first layer's input is ``sample``, ``(batch, frames, channels, height, width)``. Batch entries that the layers
    pop: ``timestep``, ``encoder_hidden_states``, ``added_time_ids``.
    ``granularity="fine"`` cuts a transformer into entry, attention and MLP of its spatial block, its temporal block
    with the mix, and exit. A transformer with several blocks stays whole, because they share the mix.
    ``upsample_size`` as for ``UNet2DConditionModel``.

    Raises :class:`GraphError` naming every part of the model that cannot be expressed.
    """
    parts = {"resnets": (SpatioTemporalResBlock,), "attentions": (TransformerSpatioTemporalModel,)}
    refuse(model, unknown_blocks(model, **BLOCKS, **parts))
    return SpatioTemporalWalk(model, origin, fine=fine, upsample_size=upsample_size).layers()


class SpatioTemporalStem(FrameStem):
    """``temb`` also holds frame rate, motion and noise: ``added_time_ids``."""

    frame_dimension = 1

    def entries(self, *, timestep_cond: bool) -> dict[str, bool]:
        return {"timestep": True, "added_time_ids": True}

    def time(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        temb = super().time(sample, entries)
        added = self.add_time_proj(entries["added_time_ids"].flatten()).reshape(sample.shape[0], -1)
        return temb + self.add_embedding(added.to(temb.dtype))


class SpatioTemporalHead(FrameHead):
    """Samples are ``(batch, frames, channels, height, width)``."""

    frame_dimension = 1


class SpatioTemporalTransformer(Part):
    """A transformer on each frame, one over the frames, and their mix."""

    def run(self, hidden: Tensor, text: Tensor, frames: Tensor) -> Tensor:
        return self.part()(hidden, per_frame(text, hidden), image_only_indicator=frames, return_dict=False)[0]


class SpatioTemporalEntry(Entry):
    """Also stashes embeddings of the frames' numbers."""

    CHILDREN = (*Entry.CHILDREN, "time_proj", "time_pos_embed")

    def forward(self, images: Tensor, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        numbers = torch.arange(frames.shape[1], device=images.device).repeat(frames.shape[0])
        places = self.block.time_pos_embed(self.block.time_proj(numbers).to(images.dtype))[:, None, :]
        return (*super().forward(images), places)


class TemporalBlock(Unit):
    """The transformer block over frames, mixed with what enters it."""

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, f"{path}.temporal_transformer_blocks.0", f"{path}.time_mixer")

    def forward(self, hidden: Tensor, text: Tensor, places: Tensor, frames: Tensor) -> Tensor:
        block, mixer = map(self.part, self.paths)
        text = text.repeat_interleave(hidden.shape[1], dim=0)  # for every pixel
        temporal = block(hidden + places, num_frames=frames.shape[1], encoder_hidden_states=text)
        return mixer(x_spatial=hidden, x_temporal=temporal, image_only_indicator=frames)


class SpatioTemporalWalk(VideoWalk):
    """Resnets and transformers hold their temporal companions."""

    stem_kind, head_kind = SpatioTemporalStem, SpatioTemporalHead

    def kinds(self) -> dict[type[nn.Module], Callable[[str], Layers]]:
        return {
            **super().kinds(),
            SpatioTemporalResBlock: lambda path: self.one(path, "temb", "frames"),
            TransformerSpatioTemporalModel: self.transformer,
        }

    def skip_resnet(self, path: str, skip: str) -> Layers:
        return self.one(path, skip, "temb", "frames", kind=SkipResnet)

    def transformer(self, path: str) -> Layers:
        if not self.fine or len(self.model.get_submodule(path).transformer_blocks) > 1:
            return self.one(path, self.text, "frames", kind=SpatioTemporalTransformer)
        model, origin, given = self.model, self.origin, {"encoder_hidden_states": self.text}
        residual, places = f"{path}.residual", f"{path}.places"
        entry, temporal = SpatioTemporalEntry(model, origin, path), TemporalBlock(model, origin, path)
        return [
            declare(entry, pop=same("frames"), stash=(residual, places), name=f"{path}.entry"),
            *WITHIN_FRAMES.block(model, origin, f"{path}.transformer_blocks.0", given),
            declare(temporal, pop=same(self.text, places, "frames"), name=f"{path}.temporal"),
            declare(Exit(model, origin, path), pop=same(residual), name=f"{path}.exit"),
        ]


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    added = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    return {
        "sample": shapes.numbers(config.num_frames, config.in_channels, *shapes.sides),
        "timestep": shapes.numbers(),
        "encoder_hidden_states": shapes.numbers(1, config.cross_attention_dim),
        "added_time_ids": shapes.numbers(added),
    }
