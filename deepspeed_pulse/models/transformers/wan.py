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
from deepspeed_pulse.models.transformers.units import (
    Piece,
    Remembered,
    Sharing,
    TokenUnit,
    classes_beside,
    declare,
    foreign,
    numbered,
    patches_value,
    same,
    size_only,
)
from deepspeed_pulse.models.units import Origin, refuse, whole

BLOCKS = classes_beside(WanTransformer3DModel, "WanTransformerBlock")
TAKES_APART = (WanTransformer3DModel, *BLOCKS)
IMAGE = "encoder_hidden_states_image"
ATTENTIONS = ("scale_shift_table", "norm1", "attn1", "norm2", "attn2")
T5_TOKENS = 512
CLIP_PICTURE_TOKENS = 257
"""Of the first frame, in models from picture to video."""


def to_layers(
    model: WanTransformer3DModel, *, granularity: str = "block", encoder_hidden_states_image: bool | None = None
) -> list[Declared]:
    """The layer list of a Wan transformer; its modules and weights are the model's own, not copies.

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
    origin = Origin.of(model)
    return whole(origin, _layers(model, origin, fine=granularity == "fine", image=(IMAGE,) if image else ()))


def _layers(model: WanTransformer3DModel, origin: Origin, *, fine: bool, image: tuple[str, ...]) -> Iterator[Declared]:
    pop = same("timestep", "encoder_hidden_states", *image)
    yield declare(Stem(model, origin), pop=pop, stash=("patches", "modulation", "temb", "text_states"))
    table = Remembered()
    pop = {"temb": "modulation", "encoder_hidden_states": "text_states", **same("patches")}
    for path in numbered(model, "blocks"):
        if fine:
            mlp = f"{path}.modulation"
            attentions = Attentions(model, origin, path, *ATTENTIONS, elsewhere=("rope",)).sharing(table)
            yield declare(attentions, pop=pop, stash=(mlp,), name=f"{path}.attn")
            yield declare(FeedForward(model, origin, path, "norm3", "ffn"), pop={"modulation": mlp}, name=f"{path}.ff")
        else:
            yield declare(Block(model, origin, path, "rope").sharing(table), pop=pop)
    yield declare(Head(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(TokenUnit):
    """Patches, the embedding of time, what it makes of it for the blocks, and the projected text and picture."""

    def __init__(self, model: WanTransformer3DModel, origin: Origin) -> None:
        super().__init__(model, origin, "patch_embedding", "condition_embedder")
        self.patch_size = tuple(model.config.patch_size)

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Tensor, ...]:
        given = self.given(popped)
        patches = patches_value(hidden, hidden.shape[2:], self.patch_size)
        tokens = self.patch_embedding(hidden).flatten(2).transpose(1, 2).contiguous()
        timestep = given["timestep"]
        of_tokens = timestep.shape[1] if timestep.ndim == 2 else None
        temb, modulation, text, image = self.condition_embedder(
            timestep.flatten(), given["encoder_hidden_states"], given.get(IMAGE), timestep_seq_len=of_tokens
        )
        if image is not None:
            text = torch.concat([image, text], dim=1)
        return tokens, patches, modulation.unflatten(-1, (6, -1)), temb, text


class _Placed(Sharing):
    """A layer that knows where the patches are."""

    def angles(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary table, as the model makes it from a video of that many patches."""
        return self.shared.get(lambda: self.rope(size_only(patches, self.rope.patch_size)), patches)


class Block(_Placed):
    """One block, called as the model calls it."""

    def forward(self, hidden: Tensor, *popped: Tensor) -> Any:
        given = self.given(popped)
        return self.part(self.paths[0])(hidden, rotary_emb=self.angles(given.pop("patches")), **given)


class Attentions(_Placed, Piece):
    """The attentions of one block; stashes shift, scale and gate of its feed-forward."""

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        block, given = self.block, self.given(popped)
        shift, scale, gate, *mlp = _modulation(block.scale_shift_table, given["temb"].float())
        normed = (block.norm1(hidden.float()) * (1 + scale) + shift).type_as(hidden)
        attended = block.attn1(normed, None, None, self.angles(given["patches"]))
        hidden = (hidden.float() + attended * gate).type_as(hidden)
        normed = block.norm2(hidden.float()).type_as(hidden)
        return hidden + block.attn2(normed, given["encoder_hidden_states"], None, None), tuple(mlp)


class FeedForward(Piece):
    """The feed-forward of one block."""

    def forward(self, hidden: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        shift, scale, gate = modulation
        normed = (self.block.norm3(hidden.float()) * (1 + scale) + shift).type_as(hidden)
        return (hidden.float() + self.block.ffn(normed).float() * gate).type_as(hidden)


class Head(TokenUnit):
    """Norm, projection, and patches back to a video."""

    def __init__(self, model: WanTransformer3DModel, origin: Origin) -> None:
        super().__init__(model, origin, "norm_out", "scale_shift_table", "proj_out")
        self.patch_size = tuple(model.config.patch_size)

    def forward(self, hidden: Tensor, patches: Tensor, temb: Tensor) -> Any:
        shift, scale = _modulation(self.scale_shift_table, temb.unsqueeze(-2))
        tokens = self.proj_out((self.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden))
        grid = tokens.unflatten(1, patches.shape).unflatten(-1, (*self.patch_size, -1))
        return grid.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _modulation(table: Tensor, embedding: Tensor) -> tuple[Tensor, ...]:
    """Their sum as n tensors ``(batch, tokens or 1, channels)``.

    Args:
        table: (1, n, channels).
        embedding: (batch, n or 1, channels), or (batch, tokens, n or 1, channels).
    """
    if embedding.ndim == 3:
        return (table + embedding).chunk(table.shape[1], dim=1)
    chunks = (table.unsqueeze(0) + embedding).chunk(table.shape[1], dim=2)
    return tuple(chunk.squeeze(2) for chunk in chunks)


def example(shapes: Shapes) -> dict[str, Any]:
    """What training scripts hand the model. 81 frames of 480 x 832."""
    config = shapes.config
    batch = {
        "hidden_states": shapes.numbers(config.in_channels, 21, 60, 104),
        "encoder_hidden_states": shapes.numbers(T5_TOKENS, config.text_dim),
        "timestep": shapes.integers(),
    }
    if config.image_dim is not None:
        batch["encoder_hidden_states_image"] = shapes.numbers(CLIP_PICTURE_TOKENS, config.image_dim)
    return batch
