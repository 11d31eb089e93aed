"""A transformer over image tokens, cut into layers: entry, attention and MLP of every block, exit.

    entry ──residual──────────────────────────────────┐
    transformer_blocks.0.attention, .mlp              │
    transformer_blocks.1.attention, .mlp, ...         │
    exit ←────────────────────────────────────────────┘

Between entry and exit the hidden state is ``(batch, tokens, channels)``; the image that entered, which the exit adds,
is a named value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.unets.units import Part
from deepspeed_pulse.models.units import Origin, Piece, bias_of_mask, declare, same

TRANSFORMERS = (Transformer2DModel, BasicTransformerBlock)
"""What layers stand in for when transformers are cut."""


class Entry(Piece):
    """Norm and projection of an image ``(batch, channels, height, width)`` to tokens; stashes the image."""

    CHILDREN: tuple[str, ...] = ("norm", "proj_in")

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, path)
        self.linear = getattr(model.get_submodule(path), "use_linear_projection", True)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        hidden, proj_in = self.block.norm(image), self.block.proj_in
        return (proj_in(_tokens(hidden)) if self.linear else _tokens(proj_in(hidden))), image


class Exit(Piece, Part):
    """Projection of the tokens back to an image, and the residual."""

    CHILDREN = ("proj_out",)

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, path)
        self.linear = getattr(model.get_submodule(path), "use_linear_projection", True)

    def run(self, hidden: Tensor, residual: Tensor) -> Tensor:
        if self.linear:
            return _image(self.part()(hidden), residual) + residual
        return self.part()(_image(hidden, residual)) + residual


class Attention(Piece):
    """``norm1``, ``attn1`` and, where the block has them, ``norm2`` and ``attn2``, each added to its input.

    What is popped is named as arguments of diffusers' ``BasicTransformerBlock``.
    """

    CHILDREN = ("pos_embed", "norm1", "attn1", "norm2", "attn2")

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, path)
        self.text_first = bool(model.get_submodule(path).only_cross_attention)

    def forward(self, hidden: Tensor, *popped: Tensor) -> Tensor:
        block, given = self.block, self.given(popped)
        text = given.get("encoder_hidden_states")
        masks = {name: bias_of_mask(given[name], hidden) for name in given if name.endswith("mask")}
        first, mask = text if self.text_first else None, masks.get("attention_mask")
        hidden = self._attend(block.norm1, block.attn1, hidden, first, mask)
        if "attn2" not in block._modules:
            return hidden
        return self._attend(block.norm2, block.attn2, hidden, text, masks.get("encoder_attention_mask"))

    def _attend(self, norm: Any, attention: Any, hidden: Tensor, text: Tensor | None, mask: Tensor | None) -> Tensor:
        normed = norm(hidden)
        if "pos_embed" in self.block._modules:
            normed = self.block.pos_embed(normed)
        return attention(normed, encoder_hidden_states=text, attention_mask=mask) + hidden


class Mlp(Piece):
    """``norm3`` and the feed-forward part, added to its input."""

    CHILDREN = ("norm3", "ff")

    def forward(self, hidden: Tensor) -> Tensor:
        return self.block.ff(self.block.norm3(hidden)) + hidden


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The units that a transformer is cut into."""

    entry: type[Piece] = Entry
    attention: type[Attention] = Attention
    exit: type[Piece] = Exit
    ends_pop: tuple[str, ...] = ()  # what entry and exit pop besides the residual

    def transformer(self, model: Any, origin: Origin, path: str, given: Mapping[str, str]) -> Iterator[Declared]:
        """The layers of a ``Transformer2DModel`` or one like it; ``given`` is the named value for each argument."""
        residual, pop = f"{path}.residual", same(*self.ends_pop)
        yield declare(self.entry(model, origin, path), pop=pop, stash=(residual,), name=f"{path}.entry")
        for index, _ in enumerate(model.get_submodule(path).transformer_blocks):
            yield from self.block(model, origin, f"{path}.transformer_blocks.{index}", given)
        yield declare(self.exit(model, origin, path), pop={"residual": residual, **pop}, name=f"{path}.exit")

    def block(self, model: Any, origin: Origin, path: str, given: Mapping[str, str]) -> Iterator[Declared]:
        """Attention and MLP of a ``BasicTransformerBlock``."""
        norm = model.get_submodule(path).norm_type
        if norm != "layer_norm":
            raise GraphError(f"{path} has norm_type {norm!r}, supported: 'layer_norm'; use granularity=\"block\"")
        yield declare(self.attention(model, origin, path), pop=given, name=f"{path}.attention")
        yield declare(Mlp(model, origin, path), name=f"{path}.mlp")


def _tokens(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def _image(tokens: Tensor, like: Tensor) -> Tensor:
    return tokens.unflatten(1, like.shape[-2:]).permute(0, 3, 1, 2).contiguous()
