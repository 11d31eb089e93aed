"""``PixArtTransformer2DModel`` (PixArt-Alpha and -Sigma) as a layer list.

    pos_embed ──modulation, text_states──▶ every block;  ──temb──▶ proj_out
    transformer_blocks.0, ..., transformer_blocks.n-1
    proj_out

No long skips. The text projection is trained, so the projected text travels as a named value with a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusers import PixArtTransformer2DModel
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.units import PatchHead, PatchUnit, halves
from deepspeed_pulse.models.units import (
    Origin,
    Piece,
    Unit,
    bias_of_mask,
    classes_beside,
    declare,
    foreign,
    numbered,
    refuse,
    same,
)

BLOCKS = classes_beside(PixArtTransformer2DModel, "BasicTransformerBlock")
TAKES_APART = (PixArtTransformer2DModel, *BLOCKS)
ADDED = "added_cond_kwargs."
TEXT = "encoder_hidden_states"
T5_TOKENS = 300


def to_layers(
    model: PixArtTransformer2DModel,
    origin: Origin,
    *,
    fine: bool,
    attention_mask: bool = False,
    encoder_attention_mask: bool = False,
) -> Iterator[Declared]:
    """The layers of a PixArt transformer.

    The first layer's input is ``hidden_states``. Batch entries that the layers pop: ``timestep``,
    ``encoder_hidden_states``; ``added_cond_kwargs.resolution`` and ``added_cond_kwargs.aspect_ratio`` when the
    model has ``use_additional_conditions``; ``attention_mask`` and ``encoder_attention_mask`` when the flags of
    these names say that the batch has them.
    With ``granularity="fine"`` the attentions of a block are one layer and its feed-forward another.
    """
    problems = list(foreign(model, numbered(model, "transformer_blocks"), BLOCKS))
    if model.config.attention_type != "default":
        problems.append(f"config.attention_type is {model.config.attention_type!r}, supported: 'default'")
    refuse(model, problems)
    projects = model.caption_projection is not None
    pop = same("timestep", *((TEXT,) if projects else ()))
    if model.use_additional_conditions:
        pop |= {name: ADDED + name for name in ("resolution", "aspect_ratio")}
    stash = ("patches", "modulation", "temb", *(("text_states",) if projects else ()))
    yield declare(Stem(model, origin), pop=pop, stash=stash)
    masks = {"attention_mask": attention_mask, "encoder_attention_mask": encoder_attention_mask}
    pop = {"timestep": "modulation", TEXT: "text_states" if projects else TEXT}
    pop |= same(*(name for name, wanted in masks.items() if wanted))
    for path in numbered(model, "transformer_blocks"):
        if fine:
            yield from halves(Attentions(model, origin, path), FeedForward(model, origin, path), pop=pop)
        else:
            yield declare(Block(model, origin, path), pop=pop)
    yield declare(Head(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(PatchUnit):
    """Patches with their positions, the embedding of time and sizes, what it makes of it for blocks, and the text."""

    OPTIONAL = ("caption_projection",)
    PARTS = ("pos_embed", "adaln_single", *OPTIONAL)

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Tensor, ...]:
        given = self.given(popped)
        tokens = self.pos_embed(hidden)
        sizes = {name: given.get(name) for name in ("resolution", "aspect_ratio")}
        modulation, temb = self.adaln_single(
            given["timestep"], sizes, batch_size=len(tokens), hidden_dtype=tokens.dtype
        )
        leaving = tokens, self.patches(hidden, *hidden.shape[-2:]), modulation, temb
        if TEXT not in given:
            return leaving
        text = self.caption_projection(given[TEXT])
        return (*leaving, text.view(len(tokens), -1, tokens.shape[-1]))


class _Masked(Unit):
    """A layer whose masks (batch, keys) become what is added to attention scores; of three dimensions they are it."""

    def read(self, hidden: Tensor, popped: tuple[Tensor, ...]) -> dict[str, Tensor]:
        given = self.given(popped)
        masks = [name for name in given if name.endswith("mask") and given[name].ndim == 2]
        return given | {name: bias_of_mask(given[name], hidden) for name in masks}


class Block(_Masked):
    """One block, called as the model calls it."""

    def forward(self, hidden: Tensor, *popped: Tensor) -> Any:
        return self.part()(hidden, **self.read(hidden, popped))


class Attentions(_Masked, Piece):
    """The attentions of one block; stashes shift, scale and gate of its feed-forward."""

    CHILDREN = ("scale_shift_table", "norm1", "attn1", "attn2")

    def __init__(self, model: nn.Module, origin: Origin, at: str) -> None:
        super().__init__(model, origin, at)
        self.only_text = bool(model.get_submodule(at).only_cross_attention)

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        block, given = self.block, self.read(hidden, popped)
        modulation = block.scale_shift_table[None] + given["timestep"].reshape(len(hidden), 6, -1)
        shift, scale, gate, *mlp = modulation.chunk(6, dim=1)
        normed = block.norm1(hidden) * (1 + scale) + shift
        text = given[TEXT] if self.only_text else None
        mask, text_mask = given.get("attention_mask"), given.get("encoder_attention_mask")
        hidden = gate * block.attn1(normed, encoder_hidden_states=text, attention_mask=mask) + hidden
        if "attn2" in block._modules:
            hidden = block.attn2(hidden, encoder_hidden_states=given[TEXT], attention_mask=text_mask) + hidden
        return hidden, tuple(mlp)


class FeedForward(Piece):
    """The feed-forward of one block."""

    CHILDREN = ("norm2", "ff")

    def forward(self, hidden: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        shift, scale, gate = modulation
        return gate * self.block.ff(self.block.norm2(hidden) * (1 + scale) + shift) + hidden


class Head(PatchHead):
    """The norm is modulated by the embedding and a table."""

    PARTS = ("norm_out", "scale_shift_table", "proj_out")

    def tokens(self, hidden: Tensor, temb: Tensor) -> Any:
        shift, scale = (self.scale_shift_table[None] + temb[:, None]).chunk(2, dim=1)
        return self.proj_out(self.norm_out(hidden) * (1 + scale) + shift)


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch: dict[str, Any] = {
        "hidden_states": shapes.numbers(config.in_channels, *shapes.sides),
        "encoder_hidden_states": shapes.numbers(T5_TOKENS, config.caption_channels),
        "timestep": shapes.integers(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    if shapes.model.use_additional_conditions:
        batch["added_cond_kwargs"] = {"resolution": shapes.numbers(2), "aspect_ratio": shapes.numbers(1)}
    return batch
