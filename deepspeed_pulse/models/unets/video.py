"""U-Nets that denoise frames: their layers, and the walk over them.

A hidden state, and every skip, is ``(batch * frames, channels, height, width)``, as within the models; ``temb`` is
``(batch * frames, channels)``. How many frames a sample has is told by the shape of a named value that the stem
stashes: ``frames``, ``(batch, frames)`` of False, which is also the indicator of frames that stand alone (none does).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers.models.resnet import TemporalConvLayer
from diffusers.models.transformers.transformer_temporal import TransformerTemporalModel
from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D
from torch import Tensor, nn

from deepspeed_pulse.models.unets.tokens import Attention, Cut
from deepspeed_pulse.models.unets.units import CrossAttention, Head, Part, Stem
from deepspeed_pulse.models.unets.walk import Layers, Walk
from deepspeed_pulse.models.units import Piece


class FrameStem(Stem):
    """Samples are ``(batch, channels, frames, height, width)``; ``temb`` is repeated for each frame."""

    frame_dimension = 2
    MORE = ("frames",)

    def embed(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        return super().embed(sample, entries).repeat_interleave(sample.shape[self.frame_dimension], dim=0)

    def enter(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        return self.conv_in(sample.movedim(self.frame_dimension, 1).flatten(0, 1))

    def more(self, sample: Tensor, entries: dict[str, Tensor]) -> tuple[Tensor, ...]:
        size = sample.shape[0], sample.shape[self.frame_dimension]
        return (*super().more(sample, entries), torch.zeros(size, dtype=torch.bool, device=sample.device))


class FrameHead(Head):
    """Back to samples ``(batch, channels, frames, height, width)``."""

    frame_dimension = 2

    def forward(self, hidden: Tensor, frames: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden).unflatten(0, frames.shape).movedim(1, self.frame_dimension)


class Temporal(Part):
    """A convolution or transformer over the frames of each pixel."""

    def run(self, hidden: Tensor, frames: Tensor) -> Tensor:
        given = {"num_frames": frames.shape[1]}
        if isinstance(self.part(), TransformerTemporalModel):
            return self.part()(hidden, **given, return_dict=False)[0]  # a tuple, which hooks on backward need
        return self.part()(hidden, **given)


class FrameCrossAttention(CrossAttention):
    """A transformer over the pixels of each frame, which all read their sample's text."""

    def run(self, hidden: Tensor, *texts: Tensor) -> Tensor:
        return super().run(hidden, *(per_frame(text, hidden) for text in texts))


def per_frame(values: Tensor, hidden: Tensor) -> Tensor:
    """``(batch, ...)`` to ``(batch * frames, ...)``; what has a row for each frame already stays."""
    return values.repeat_interleave(hidden.shape[0] // values.shape[0], dim=0)


class FrameAttention(Attention):
    """Attention of a block within each frame."""

    def forward(self, hidden: Tensor, *texts: Tensor) -> Tensor:
        return super().forward(hidden, *(per_frame(text, hidden) for text in texts))


class TemporalEntry(Piece):
    """Images to tokens ``(batch * pixels, frames, channels)``; stashes the images."""

    CHILDREN = ("norm", "proj_in")

    def forward(self, images: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        samples = images.unflatten(0, frames.shape).transpose(1, 2)  # the statistics of the norm span the frames
        return self.block.proj_in(self.block.norm(samples).permute(0, 3, 4, 2, 1).flatten(0, 2)), images


class TemporalExit(Piece, Part):
    """Back to images."""

    CHILDREN = ("proj_out",)

    def run(self, hidden: Tensor, residual: Tensor, frames: Tensor) -> Tensor:
        images = self.part()(hidden).unflatten(0, (frames.shape[0], *residual.shape[-2:]))
        return images.permute(0, 3, 4, 1, 2).flatten(0, 1).contiguous() + residual


WITHIN_FRAMES = Cut(attention=FrameAttention)
OVER_FRAMES = Cut(entry=TemporalEntry, exit=TemporalExit, ends_pop=("frames",))


class VideoWalk(Walk):
    """2-D layers run on each frame, temporal ones over the frames of each pixel."""

    stem_kind = FrameStem
    head_kind = FrameHead
    head_pop = ("frames",)
    transformer_kind = FrameCrossAttention
    cut = WITHIN_FRAMES

    def kinds(self) -> dict[type[nn.Module], Callable[[str], Layers]]:
        return {
            **super().kinds(),
            TemporalConvLayer: lambda path: self.one(path, "frames", kind=Temporal),
            TransformerTemporalModel: self.over_frames,
            AnimateDiffTransformer3D: self.over_frames,
        }

    def over_frames(self, path: str) -> Layers:
        """A transformer over the frames of each pixel, which reads no text."""
        if self.fine:
            return list(OVER_FRAMES.transformer(self.model, self.origin, path, {}))
        return self.one(path, "frames", kind=Temporal)
