"""Layers of U-Nets that denoise frames.

A hidden state, and every skip, is ``(batch * frames, channels, height, width)``, as within the models; ``temb`` is
``(batch * frames, channels)``. How many frames a sample has is told by the shape of a named value that the stem
stashes: ``frames``, ``(batch, frames)`` of False, which is also the indicator of frames that stand alone (none does).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed_pulse.models.unets.tokens import Attention
from deepspeed_pulse.models.unets.units import CrossAttention, Head, Producer, Stem
from deepspeed_pulse.models.units import Origin, Unit


class FrameStem(Stem):
    """Samples are ``(batch, channels, frames, height, width)``; ``temb`` is repeated for each frame."""

    frame_dimension = 2

    def __init__(self, model: Any, origin: Origin, *, timestep_cond: bool = False) -> None:
        super().__init__(model, origin, timestep_cond=timestep_cond)
        self.stashes = (*self.stashes, "frames")

    def embed(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        return super().embed(sample, entries).repeat_interleave(sample.shape[self.frame_dimension], dim=0)

    def enter(self, sample: Tensor, entries: dict[str, Tensor]) -> Tensor:
        return self.conv_in(sample.movedim(self.frame_dimension, 1).flatten(0, 1))

    def more(self, sample: Tensor, entries: dict[str, Tensor]) -> tuple[Tensor, ...]:
        frames = torch.zeros(
            sample.shape[0], sample.shape[self.frame_dimension], dtype=torch.bool, device=sample.device
        )
        return (*super().more(sample, entries), frames)


class FrameHead(Head):
    """Back to samples ``(batch, channels, frames, height, width)``."""

    frame_dimension = 2

    def forward(self, hidden: Tensor, frames: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden).unflatten(0, frames.shape).movedim(1, self.frame_dimension)


class Temporal(Producer):
    """A convolution or transformer over the frames of each pixel."""

    def run(self, hidden: Tensor, frames: Tensor) -> Tensor:
        return self.part()(hidden, num_frames=frames.shape[1])


class TemporalTransformer(Producer):
    """diffusers' ``TransformerTemporalModel``."""

    def run(self, hidden: Tensor, frames: Tensor) -> Tensor:
        return self.part()(hidden, num_frames=frames.shape[1], return_dict=False)[0]


class FrameCrossAttention(CrossAttention):
    """A transformer over the pixels of each frame, which all read their sample's text."""

    def run(self, hidden: Tensor, *texts: Tensor) -> Tensor:
        return super().run(hidden, *(per_frame(text, hidden) for text in texts))


def per_frame(values: Tensor, hidden: Tensor) -> Tensor:
    """``(batch, ...)`` to ``(batch * frames, ...)``; what has a row for each frame already stays."""
    return values.repeat_interleave(hidden.shape[0] // values.shape[0], dim=0)


# ------------------------------------------------------------------------------ transformers cut further


class FrameAttention(Attention):
    """Attention of a block within each frame."""

    def forward(self, hidden: Tensor, *texts: Tensor) -> Tensor:
        return super().forward(hidden, *(per_frame(text, hidden) for text in texts))


class TemporalEntry(Unit):
    """Images to tokens ``(batch * pixels, frames, channels)``; stashes the images."""

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, f"{path}.norm", f"{path}.proj_in")

    def forward(self, images: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        norm, proj_in = map(self.part, self.paths)
        samples = images.unflatten(0, frames.shape).transpose(1, 2)  # the statistics of the norm span the frames
        return proj_in(norm(samples).permute(0, 3, 4, 2, 1).flatten(0, 2)), images


class TemporalExit(Producer):
    """Back to images."""

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, f"{path}.proj_out")

    def run(self, hidden: Tensor, residual: Tensor, frames: Tensor) -> Tensor:
        images = self.part()(hidden).unflatten(0, (frames.shape[0], *residual.shape[-2:]))
        return images.permute(0, 3, 4, 1, 2).flatten(0, 1).contiguous() + residual
