"""``FluxTransformer2DModel`` as a layer list.

    x_embedder ──temb──▶ every block and proj_out
    transformer_blocks.0, ...                 (hidden, text) attend together, each with its own weights
    single_transformer_blocks.0, ...          (hidden, text) with the same weights
    proj_out

The rotary table is made on every rank from ``txt_ids`` and ``img_ids``, once for a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.joint_blocks import JointAttention, JointBlock, JointFeedForward
from deepspeed_pulse.models.transformers.units import Remembered, Sharing, halves
from deepspeed_pulse.models.units import Origin, Unit, classes_beside, declare, foreign, numbered, refuse, same

BLOCKS = classes_beside(FluxTransformer2DModel, "FluxTransformerBlock")
SINGLE_BLOCKS = classes_beside(FluxTransformer2DModel, "FluxSingleTransformerBlock")
TAKES_APART = (FluxTransformer2DModel, *BLOCKS)
T5_TOKENS = 512


def to_layers(model: FluxTransformer2DModel, origin: Origin, *, fine: bool) -> Iterator[Declared]:
    """The layers of a Flux transformer.

    The first layer's input is ``hidden_states``, packed latents. Batch entries that the layers pop: ``timestep``
    (divided by 1000, as the model takes it), ``encoder_hidden_states``, ``pooled_projections``, ``txt_ids``,
    ``img_ids``, and ``guidance`` when the config has ``guidance_embeds``.
    With ``granularity="fine"`` the attention of a block of two streams is one layer and its feed-forwards
    another. The blocks of one stream stay whole: they compute both at once and project them together.
    """
    double, single = numbered(model, "transformer_blocks"), numbered(model, "single_transformer_blocks")
    refuse(model, [*foreign(model, double, BLOCKS), *foreign(model, single, SINGLE_BLOCKS)])
    guidance = ("guidance",) if model.config.guidance_embeds else ()
    entries = ("timestep", "encoder_hidden_states", "pooled_projections", *guidance)
    yield declare(Stem(model, origin), pop=same(*entries), stash=("temb",))
    table, pop = Remembered(), same("temb", "txt_ids", "img_ids")
    for path in (*double, *single):
        last = path == [*double, *single][-1]
        if fine and path in double:
            attention = Attention(model, origin, path, "pos_embed").sharing(table)
            feed_forward = JointFeedForward(model, origin, path, last=last, clips_half=True)
            yield from halves(attention, feed_forward, pop=pop)
        else:
            block = Block(model, origin, path, "pos_embed", text_first=True, last=last).sharing(table)
            yield declare(block, pop=pop)
    yield declare(Head(model, origin), pop=same("temb"), name="proj_out")


class Stem(Unit):
    """The projected latents and text, and the embedding of time, guidance and pooled text."""

    PARTS = ("x_embedder", "time_text_embed", "context_embedder")

    def forward(self, latents: Tensor, *popped: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        given = self.given(popped)
        hidden = self.x_embedder(latents)
        conditions = [given[name].to(hidden.dtype) * 1000 for name in ("timestep", "guidance") if name in given]
        temb = self.time_text_embed(*conditions, given["pooled_projections"])
        return (hidden, self.context_embedder(given["encoder_hidden_states"])), temb


class _Placed(Sharing):
    """A layer that knows where text and patches are."""

    def given(self, popped: tuple[Any, ...]) -> dict[str, Any]:
        given = super().given(popped)
        ids = given.pop("txt_ids"), given.pop("img_ids")
        given["image_rotary_emb"] = self.shared.get(lambda: self._angles(*ids), *ids)
        return given

    def _angles(self, *ids: Tensor) -> tuple[Tensor, Tensor]:
        flat = [each[0] if each.ndim == 3 else each for each in ids]  # an old form has a batch dimension
        return self.pos_embed(torch.cat(flat, dim=0))


class Block(_Placed, JointBlock):
    """A block of two streams or of one."""


class Attention(_Placed, JointAttention):
    """The attention of a block of two streams."""


class Head(Unit):
    """Norm and projection to packed latents."""

    PARTS = ("norm_out", "proj_out")

    def forward(self, hidden: Tensor, temb: Tensor) -> Any:
        return self.proj_out(self.norm_out(hidden, temb))


def example(shapes: Shapes) -> dict[str, Any]:
    """1024 x 1024: 64 x 64 packed patches."""
    config = shapes.config
    batch = {
        "hidden_states": shapes.numbers(64 * 64, config.in_channels),
        "encoder_hidden_states": shapes.numbers(T5_TOKENS, config.joint_attention_dim),
        "pooled_projections": shapes.numbers(config.pooled_projection_dim),
        "timestep": shapes.numbers(),
        "txt_ids": shapes.table(T5_TOKENS, 3),
        "img_ids": shapes.table(64 * 64, 3),
    }
    return batch | ({"guidance": shapes.numbers()} if config.guidance_embeds else {})
