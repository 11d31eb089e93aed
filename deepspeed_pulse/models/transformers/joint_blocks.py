"""Blocks in which a picture and its text attend together (MMDiT: SD3, Flux, HunyuanVideo).

The hidden state between them is the pair ``(hidden, text)``, each ``(batch, tokens, channels)``; after the last
block, which the model reads no text from, it is ``hidden`` alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.models.units import Origin, Piece, Unit

Streams = Tensor | tuple[Tensor, Tensor]

HALF_RANGE = 65504
"""Largest number of type float16."""


class JointBlock(Unit):
    """One block, called as the model calls it."""

    def __init__(
        self, model: nn.Module, origin: Origin, path: str, *more: str, text_first: bool = False, last: bool = False
    ) -> None:
        super().__init__(model, origin, path, *more)
        self.text_first, self.last = text_first, last

    def forward(self, streams: tuple[Tensor, Tensor], *popped: Any) -> Streams:
        hidden, text = streams
        hidden, text = self.part()(hidden_states=hidden, encoder_hidden_states=text, **self.given(popped))
        if self.text_first:
            hidden, text = text, hidden
        return hidden if self.last else (hidden, text)


class JointAttention(Piece):
    """The attentions of one block; stashes the modulation of its feed-forward: shift, scale and gate a stream."""

    CHILDREN = ("norm1", "norm1_context", "attn", "attn2")

    def __init__(self, model: nn.Module, origin: Origin, at: str, *more: str) -> None:
        super().__init__(model, origin, at, *more)
        # True for the last block of SD3, in which the text is only attended to.
        self.text_ends = bool(getattr(model.get_submodule(at), "context_pre_only", False))
        self.attends_twice = "attn2" in self.block._modules

    def forward(self, streams: tuple[Tensor, Tensor], *popped: Any) -> tuple[Streams, tuple[Tensor, ...]]:
        hidden, text = streams
        block, inputs = self.block, self.given(popped)
        temb = inputs.pop("temb")
        normed, gate, *modulation = block.norm1(hidden, emb=temb)
        if self.text_ends:
            normed_text, text_modulation = block.norm1_context(text, temb), []
        else:
            normed_text, text_gate, *text_modulation = block.norm1_context(text, emb=temb)
        output, text_output = block.attn(hidden_states=normed, encoder_hidden_states=normed_text, **inputs)
        hidden = hidden + gate.unsqueeze(1) * output
        if self.attends_twice:  # SD3.5: the picture attends to itself beside
            *modulation, normed, gate = modulation
            hidden = hidden + gate.unsqueeze(1) * block.attn2(hidden_states=normed)
        streams = hidden if self.text_ends else (hidden, text + text_gate.unsqueeze(1) * text_output)
        return streams, (*modulation, *text_modulation)


class JointFeedForward(Piece):
    """The feed-forwards of one block; ``clips_half``: text in float16 is clipped to its range, as Flux's blocks do."""

    CHILDREN = ("norm2", "ff", "norm2_context", "ff_context")

    def __init__(self, model: Any, origin: Origin, at: str, *, last: bool, clips_half: bool = False) -> None:
        super().__init__(model, origin, at)
        self.last, self.clips_half = last, clips_half

    def forward(self, streams: Streams, modulation: tuple[Tensor, ...]) -> Streams:
        block = self.block
        if isinstance(streams, Tensor):
            return _feed(block.norm2, block.ff, streams, *modulation)
        hidden, text = streams
        hidden = _feed(block.norm2, block.ff, hidden, *modulation[:3])
        if self.last:
            return hidden
        text = _feed(block.norm2_context, block.ff_context, text, *modulation[3:])
        if self.clips_half and text.dtype == torch.float16:
            text = text.clip(-HALF_RANGE, HALF_RANGE)
        return hidden, text


def _feed(norm: Any, feed_forward: Any, hidden: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    modulated = norm(hidden) * (1 + scale[:, None]) + shift[:, None]
    return hidden + gate.unsqueeze(1) * feed_forward(modulated)
