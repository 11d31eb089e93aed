"""``WanTransformer3DModel`` (Wan 2.1 and 2.2) as a layer list.

    patch_embedding ──modulation, text_states──▶ every block;  ──temb──▶ proj_out
    blocks.0, ..., blocks.n-1
    proj_out

No long skips. The rotary table is made on every rank from the number of patches, once for a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.units import PatchHead, PatchUnit, Remembered, Sharing, halves, size_only
from deepspeed_pulse.models.units import Origin, Piece, Whole, classes_beside, declare, foreign, numbered, refuse, same

BLOCKS = classes_beside(WanTransformer3DModel, "WanTransformerBlock")
TAKES_APART = (WanTransformer3DModel, *BLOCKS)
IMAGE = "encoder_hidden_states_image"
T5_TOKENS = 512
CLIP_PICTURE_TOKENS = 257
"""Of the first frame, in models from picture to video."""


def to_layers(
    model: WanTransformer3DModel, origin: Origin, *, fine: bool, encoder_hidden_states_image: bool | None = None
) -> Iterator[Declared]:
    """The layers of a Wan transformer.

    The first layer's input is ``hidden_states``. Batch entries that the layers pop: ``timestep`` (one for a sample,
    or one for a token as in 2.2), ``encoder_hidden_states``, and ``encoder_hidden_states_image`` when the batch has
    it; by default when the model embeds pictures (``config.image_dim``).
    With ``granularity="fine"`` the attentions of a block are one layer and its feed-forward another.
    """
    embeds_images = model.condition_embedder.image_embedder is not None
    image = embeds_images if encoder_hidden_states_image is None else encoder_hidden_states_image
    problems = list(foreign(model, numbered(model, "blocks"), BLOCKS))
    if image and not embeds_images:
        problems.append(f"{IMAGE}=True was asked for, but config.image_dim is None")
    refuse(model, problems)
    pop = same("timestep", "encoder_hidden_states", *((IMAGE,) if image else ()))
    yield declare(Stem(model, origin), pop=pop, stash=("patches", "modulation", "temb", "text_states"))
    table = Remembered()
    pop = {"temb": "modulation", "encoder_hidden_states": "text_states", **same("patches")}
    for path in numbered(model, "blocks"):
        if fine:
            attentions = Attentions(model, origin, path, "rope").sharing(table)
            yield from halves(attentions, FeedForward(model, origin, path), pop=pop)
        else:
            yield declare(Block(model, origin, path, "rope").sharing(table), pop=pop)
    yield declare(Head(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(PatchUnit):
    """Patches, the embedding of time, what it makes of it for the blocks, and the projected text and picture."""

    PARTS = ("patch_embedding", "condition_embedder")

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Tensor, ...]:
        given = self.given(popped)
        tokens = self.patch_embedding(hidden).flatten(2).transpose(1, 2).contiguous()
        timestep = given["timestep"]
        of_tokens = timestep.shape[1] if timestep.ndim == 2 else None
        temb, modulation, text, image = self.condition_embedder(
            timestep.flatten(), given["encoder_hidden_states"], given.get(IMAGE), timestep_seq_len=of_tokens
        )
        if image is not None:
            text = torch.concat([image, text], dim=1)
        return tokens, self.patches(hidden, *hidden.shape[2:]), modulation.unflatten(-1, (6, -1)), temb, text


class _Placed(Sharing):
    """A layer that knows where the patches are."""

    def given(self, popped: tuple[Any, ...]) -> dict[str, Any]:
        """With the rotary table, as the model makes it from a video of that many patches."""
        given = super().given(popped)
        patches = given.pop("patches")
        angles = self.shared.get(lambda: self.rope(size_only(patches, self.rope.patch_size)), patches)
        return {**given, "rotary_emb": angles}


class Block(_Placed, Whole):
    """One block, called as the model calls it."""


class Attentions(_Placed, Piece):
    """The attentions of one block; stashes shift, scale and gate of its feed-forward."""

    CHILDREN = ("scale_shift_table", "norm1", "attn1", "norm2", "attn2")

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        block, given = self.block, self.given(popped)
        shift, scale, gate, *mlp = _modulation(block.scale_shift_table, given["temb"].float())
        normed = (block.norm1(hidden.float()) * (1 + scale) + shift).type_as(hidden)
        attended = block.attn1(normed, None, None, given["rotary_emb"])
        hidden = (hidden.float() + attended * gate).type_as(hidden)
        normed = block.norm2(hidden.float()).type_as(hidden)
        return hidden + block.attn2(normed, given["encoder_hidden_states"], None, None), tuple(mlp)


class FeedForward(Piece):
    """The feed-forward of one block."""

    CHILDREN = ("norm3", "ffn")

    def forward(self, hidden: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        shift, scale, gate = modulation
        normed = (self.block.norm3(hidden.float()) * (1 + scale) + shift).type_as(hidden)
        return (hidden.float() + self.block.ffn(normed).float() * gate).type_as(hidden)


class Head(PatchHead):
    """The norm is modulated by the embedding and a table."""

    PARTS = ("norm_out", "scale_shift_table", "proj_out")

    def tokens(self, hidden: Tensor, temb: Tensor) -> Any:
        shift, scale = _modulation(self.scale_shift_table, temb.unsqueeze(-2))
        return self.proj_out((self.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden))


def _modulation(table: Tensor, embedding: Tensor) -> tuple[Tensor, ...]:
    """Sum of (1, n, channels) and (batch[, tokens], n or 1, channels) as n tensors (batch, tokens or 1, channels)."""
    if embedding.ndim == 3:
        return (table + embedding).chunk(table.shape[1], dim=1)
    chunks = (table.unsqueeze(0) + embedding).chunk(table.shape[1], dim=2)
    return tuple(chunk.squeeze(2) for chunk in chunks)


def example(shapes: Shapes) -> dict[str, Any]:
    """81 frames of 480 x 832."""
    config = shapes.config
    batch = {
        "hidden_states": shapes.numbers(config.in_channels, 21, 60, 104),
        "encoder_hidden_states": shapes.numbers(T5_TOKENS, config.text_dim),
        "timestep": shapes.integers(),
    }
    if config.image_dim is not None:
        batch["encoder_hidden_states_image"] = shapes.numbers(CLIP_PICTURE_TOKENS, config.image_dim)
    return batch
