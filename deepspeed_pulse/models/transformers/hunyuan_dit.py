"""``HunyuanDiT2DModel`` (1.1 and 1.2) as a layer list.

    pos_embed ──temb, text_states──▶ every block
    blocks.0 ──skip0───────────────────────┐
    ...                                    │
    blocks.n/2-2 ──skip──────┐             │
    blocks.n/2-1, blocks.n/2 │             │
    blocks.n/2+1 ←───────────┘             │
    ...                                    │
    blocks.n-1 ←───────────────────────────┘
    proj_out

The text projection is trained, so the projected text travels as a named value with a gradient. The
rotary table is a batch entry, as the model's own forward takes it: every rank reads it from its data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import HunyuanDiT2DModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.units import PatchHead, PatchUnit
from deepspeed_pulse.models.units import Origin, Piece, Whole, classes_beside, declare, foreign, numbered, refuse, same

BLOCKS = classes_beside(HunyuanDiT2DModel, "HunyuanDiTBlock")
TAKES_APART = (HunyuanDiT2DModel, *BLOCKS)
TEXT = ("encoder_hidden_states", "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5")


def to_layers(
    model: HunyuanDiT2DModel, origin: Origin, *, fine: bool, image_rotary_emb: bool = True
) -> Iterator[Declared]:
    """The layers of a HunyuanDiT.

    The first layer's input is ``hidden_states``. Batch entries that the layers pop: ``timestep`` (of a
    floating type), ``encoder_hidden_states``, ``text_embedding_mask``, ``encoder_hidden_states_t5``,
    ``text_embedding_mask_t5``; for 1.1, whose config has ``use_style_cond_and_image_meta_size``, also
    ``image_meta_size`` and ``style``; and ``image_rotary_emb``, the pair (cos, sin), unless the flag of
    that name is False.
    With ``granularity="fine"`` the attentions of a block are one layer and its feed-forward another.
    """
    paths = numbered(model, "blocks")
    refuse(model, foreign(model, paths, BLOCKS))
    sized = ("image_meta_size", "style") if model.config.use_style_cond_and_image_meta_size else ()
    yield declare(Stem(model, origin), stash=("patches", "temb", "text_states"), pop=same("timestep", *TEXT, *sized))
    for index, path in enumerate(paths):
        pop = {"temb": "temb", "encoder_hidden_states": "text_states"}
        pop |= same("image_rotary_emb") if image_rotary_emb else {}
        pop |= {"skip": f"skip{len(paths) - 1 - index}"} if index > len(paths) // 2 else {}
        skip = f"skip{index}" if index < len(paths) // 2 - 1 else None
        if fine:
            yield declare(Attentions(model, origin, path), pop=pop, name=f"{path}.attn")
            yield declare(FeedForward(model, origin, path), skip=skip, name=f"{path}.ff")
        else:
            yield declare(Whole(model, origin, path), pop=pop, skip=skip)
    yield declare(Head(model, origin), pop=same("patches", "temb"), name="proj_out")


class Stem(PatchUnit):
    """Patches, the embedding of time, pooled text, size and style, and the projected text."""

    PARTS = ("pos_embed", "time_extra_emb", "text_embedder", "text_embedding_padding")

    def forward(self, hidden: Tensor, *popped: Tensor) -> tuple[Tensor, ...]:
        given = self.given(popped)
        timestep, t5 = given["timestep"], given["encoder_hidden_states_t5"]
        sizes = given.get("image_meta_size"), given.get("style")
        temb = self.time_extra_emb(timestep, t5, *sizes, hidden_dtype=timestep.dtype)
        return self.pos_embed(hidden), self.patches(hidden, *hidden.shape[-2:]), temb, self._text(given)

    def _text(self, given: dict[str, Tensor]) -> Tensor:
        t5 = given["encoder_hidden_states_t5"]
        projected = self.text_embedder(t5.flatten(0, 1)).unflatten(0, t5.shape[:2])
        text = torch.cat([given["encoder_hidden_states"], projected], dim=1)
        mask = torch.cat([given["text_embedding_mask"], given["text_embedding_mask_t5"]], dim=-1)
        return torch.where(mask.unsqueeze(2).bool(), text, self.text_embedding_padding)


class Attentions(Piece):
    """The first part of a block: long skip, attention among the patches, attention to the text."""

    CHILDREN = ("skip_norm", "skip_linear", "norm1", "attn1", "norm2", "attn2")

    def forward(self, hidden: Tensor, *popped: Any) -> Tensor:
        block, given = self.block, self.given(popped)
        if "skip" in given:
            hidden = block.skip_linear(block.skip_norm(torch.cat([hidden, given["skip"]], dim=-1)))
        rotary, text = given.get("image_rotary_emb"), given["encoder_hidden_states"]
        hidden = hidden + block.attn1(block.norm1(hidden, given["temb"]), image_rotary_emb=rotary)
        return hidden + block.attn2(block.norm2(hidden), encoder_hidden_states=text, image_rotary_emb=rotary)


class FeedForward(Piece):
    """The second part of a block."""

    CHILDREN = ("norm3", "ff")

    def forward(self, hidden: Tensor) -> Any:
        return self.leave(hidden + self.block.ff(self.block.norm3(hidden)))


class Head(PatchHead):
    """The norm takes the embedding in float32."""

    def tokens(self, hidden: Tensor, temb: Tensor) -> Tensor:
        return super().tokens(hidden, temb.to(torch.float32))


def example(shapes: Shapes) -> dict[str, Any]:
    config, (height, width) = shapes.config, shapes.sides
    num_patches = (height // config.patch_size) * (width // config.patch_size)
    batch: dict[str, Any] = {
        "hidden_states": shapes.numbers(config.in_channels, height, width),
        "timestep": shapes.numbers(),
        "encoder_hidden_states": shapes.numbers(config.text_len, config.cross_attention_dim),
        "text_embedding_mask": shapes.integers(config.text_len),
        "encoder_hidden_states_t5": shapes.numbers(config.text_len_t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": shapes.integers(config.text_len_t5),
        "image_rotary_emb": tuple(shapes.table(num_patches, config.attention_head_dim) for _ in ("cos", "sin")),
    }
    if config.use_style_cond_and_image_meta_size:
        batch |= {"image_meta_size": shapes.numbers(6), "style": shapes.integers()}
    return batch
