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
from deepspeed_pulse.models.transformers.joint_blocks import JointAttention, JointBlock, JointFeedForward, joint_halves
from deepspeed_pulse.models.transformers.units import (
    TokenUnit,
    classes_beside,
    declare,
    foreign,
    numbered,
    patches_value,
    same,
    unpatchify,
)
from deepspeed_pulse.models.units import Origin, check_cover, refuse

BLOCKS = classes_beside(SD3Transformer2DModel, "JointTransformerBlock")
TAKES_APART = (SD3Transformer2DModel, *BLOCKS)


def to_layers(model: SD3Transformer2DModel, *, granularity: str = "block") -> list[Declared]:
    """The layer list of an SD3 transformer; its modules and weights are the model's own, not copies.

    The first layer's input is ``hidden_states``. Batch entries that the layers pop: ``timestep``,
    ``encoder_hidden_states``, ``pooled_projections``.

    With ``granularity="fine"`` the attention of a block is one layer and its feed-forwards another.
    """
    refuse(model, foreign(model, numbered(model, "transformer_blocks"), BLOCKS))
    origin = Origin.of(model)
    layers = list(_layers(model, origin, fine=granularity == "fine"))
    check_cover((declared.layer for declared in layers), origin)
    return layers


def _layers(model: SD3Transformer2DModel, origin: Origin, *, fine: bool) -> Iterator[Declared]:
    entries = ("timestep", "encoder_hidden_states", "pooled_projections")
    yield declare(Stem(model, origin), pop=same(*entries), stash=("patches", "temb"))
    paths = numbered(model, "transformer_blocks")
    for path in paths:
        last = path == paths[-1]
        if fine:
            attention = JointAttention(model, origin, path)
            yield from joint_halves(attention, JointFeedForward(model, origin, path, last=last), pop=same("temb"))
        else:
            yield declare(JointBlock(model, origin, path, text_first=True, last=last), pop=same("temb"))
    yield declare(Head(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(TokenUnit):
    """Patches with their positions, the embedding of time and pooled text, and the projected text."""

    def __init__(self, model: SD3Transformer2DModel, origin: Origin) -> None:
        super().__init__(model, origin, "pos_embed", "time_text_embed", "context_embedder")

    def forward(
        self, hidden: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        height, width = (side // self.pos_embed.patch_size for side in hidden.shape[-2:])
        streams = self.pos_embed(hidden).contiguous(), self.context_embedder(text)
        return streams, patches_value(hidden, height, width), self.time_text_embed(timestep, pooled)


class Head(TokenUnit):
    """Norm, projection, and patches back to a picture."""

    def __init__(self, model: SD3Transformer2DModel, origin: Origin) -> None:
        super().__init__(model, origin, "norm_out", "proj_out")
        self.patch_size = model.config.patch_size

    def forward(self, hidden: Tensor, patches: Tensor, temb: Tensor) -> Any:
        return unpatchify(self.proj_out(self.norm_out(hidden, temb)), patches.shape, self.patch_size)
