"""The walk over U-Nets that denoise frames."""

from __future__ import annotations

from collections.abc import Callable

from diffusers.models.resnet import TemporalConvLayer
from diffusers.models.transformers.transformer_temporal import TransformerTemporalModel
from torch import nn

from deepspeed_pulse.engine.specs import spec
from deepspeed_pulse.models.unets.tokens import Cut
from deepspeed_pulse.models.unets.video_units import (
    FrameAttention,
    FrameCrossAttention,
    FrameHead,
    FrameStem,
    Temporal,
    TemporalEntry,
    TemporalExit,
    TemporalTransformer,
)
from deepspeed_pulse.models.unets.walk import Layers, Walk

WITHIN_FRAMES = Cut(attention=FrameAttention)
OVER_FRAMES = Cut(entry=TemporalEntry, exit=TemporalExit, ends_pop=("frames",))


class VideoWalk(Walk):
    """2-D layers run on each frame, temporal ones over the frames of each pixel."""

    stem_kind = FrameStem
    head_kind = FrameHead

    def head(self) -> Layers:
        return [spec(self.head_kind(self.model, self.origin), name="conv_out", pop="frames")]

    def kinds(self) -> dict[type[nn.Module], Callable[[str], Layers]]:
        temporal = {
            TemporalConvLayer: lambda path: self.one(Temporal, path, pop=("frames",)),
            TransformerTemporalModel: lambda path: self.over_frames(TemporalTransformer, path),
        }
        return {**super().kinds(), **temporal}

    def transformer(self, path: str) -> Layers:
        if self.fine:
            given = {"encoder_hidden_states": self.text}
            return list(WITHIN_FRAMES.transformer(self.model, self.origin, path, given))
        return self.one(FrameCrossAttention, path, pop=(self.text,))

    def over_frames(self, kind: type[nn.Module], path: str) -> Layers:
        """A transformer over the frames of each pixel, which reads no text."""
        if self.fine:
            return list(OVER_FRAMES.transformer(self.model, self.origin, path, {}))
        return self.one(kind, path, pop=("frames",))
