"""``SD3Transformer2DModel`` (Stable Diffusion 3 and 3.5) as a layer list.

    pos_embed ──temb──▶ every block and proj_out
    transformer_blocks.0, ..., transformer_blocks.n-1        (hidden, text)
    proj_out

No long skips: the pair of picture and text travels from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusers import SD3Transformer2DModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.joint_blocks import JointAttention, JointBlock, JointFeedForward
from deepspeed_pulse.models.transformers.units import PatchHead, PatchUnit, halves
from deepspeed_pulse.models.units import Origin, classes_beside, declare, foreign, numbered, refuse, same

BLOCKS = classes_beside(SD3Transformer2DModel, "JointTransformerBlock")
TAKES_APART = (SD3Transformer2DModel, *BLOCKS)
TOKENS = 77 + 256
"""Of CLIP and T5, one after the other."""


def to_layers(model: SD3Transformer2DModel, origin: Origin, *, fine: bool) -> Iterator[Declared]:
    """The layers of an SD3 transformer.

    The first layer's input is ``hidden_states``. Batch entries that the layers pop: ``timestep``,
    ``encoder_hidden_states``, ``pooled_projections``.
    With ``granularity="fine"`` the attention of a block is one layer and its feed-forwards another.
    """
    paths = numbered(model, "transformer_blocks")
    refuse(model, foreign(model, paths, BLOCKS))
    entries = ("timestep", "encoder_hidden_states", "pooled_projections")
    yield declare(Stem(model, origin), pop=same(*entries), stash=("patches", "temb"))
    for path in paths:
        last = path == paths[-1]
        if fine:
            feed_forward = JointFeedForward(model, origin, path, last=last)
            yield from halves(JointAttention(model, origin, path), feed_forward, pop=same("temb"))
        else:
            yield declare(JointBlock(model, origin, path, text_first=True, last=last), pop=same("temb"))
    yield declare(PatchHead(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(PatchUnit):
    """Patches with their positions, the embedding of time and pooled text, and the projected text."""

    PARTS = ("pos_embed", "time_text_embed", "context_embedder")

    def forward(
        self, hidden: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        streams = self.pos_embed(hidden).contiguous(), self.context_embedder(text)
        return streams, self.patches(hidden, *hidden.shape[-2:]), self.time_text_embed(timestep, pooled)


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    return {
        "hidden_states": shapes.numbers(config.in_channels, *shapes.sides),
        "encoder_hidden_states": shapes.numbers(TOKENS, config.joint_attention_dim),
        "pooled_projections": shapes.numbers(config.pooled_projection_dim),
        "timestep": shapes.integers(),
    }
