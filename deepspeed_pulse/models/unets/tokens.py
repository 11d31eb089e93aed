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

from torch import Tensor

from deepspeed_pulse.engine.specs import Declared, spec
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models.unets.units import Producer
from deepspeed_pulse.models.units import Origin, Unit


class Entry(Unit):
    """Norm and projection of an image ``(batch, channels, height, width)`` to tokens; stashes the image."""

    def __init__(self, model: Any, origin: Origin, path: str, *more: str) -> None:
        super().__init__(model, origin, *(f"{path}.{name}" for name in ("norm", "proj_in", *more)))
        self.linear = getattr(model.get_submodule(path), "use_linear_projection", True)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        norm, proj_in = map(self.part, self.paths[:2])
        hidden = norm(image)
        return (proj_in(_tokens(hidden)) if self.linear else _tokens(proj_in(hidden))), image


class Exit(Producer):
    """Projection of the tokens back to an image, and the residual."""

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, f"{path}.proj_out")
        self.linear = getattr(model.get_submodule(path), "use_linear_projection", True)

    def run(self, hidden: Tensor, residual: Tensor) -> Tensor:
        if self.linear:
            return _image(self.part()(hidden), residual) + residual
        return self.part()(_image(hidden, residual)) + residual


class Attention(Unit):
    """``norm1``, ``attn1`` and, where the block has them, ``norm2`` and ``attn2``, each added to its input.

    ``reads`` names what is popped, as arguments of diffusers' ``BasicTransformerBlock``.
    """

    PARTS = ("pos_embed", "norm1", "attn1", "norm2", "attn2")

    def __init__(self, model: Any, origin: Origin, path: str, *, reads: tuple[str, ...]) -> None:
        block = model.get_submodule(path)
        present = [name for name in self.PARTS if getattr(block, name, None) is not None]
        super().__init__(model, origin, *(f"{path}.{name}" for name in present))
        self.block_path, self.reads = path, reads
        self.two, self.placed = "attn2" in present, "pos_embed" in present
        self.text_first = bool(block.only_cross_attention)

    def forward(self, hidden: Tensor, *popped: Tensor) -> Tensor:
        given = dict(zip(self.reads, popped, strict=True))
        text = given.get("encoder_hidden_states")
        masks = {name: bias_of_mask(given[name], hidden) for name in given if name.endswith("mask")}
        hidden = self._attend("1", hidden, text if self.text_first else None, masks.get("attention_mask"))
        return self._attend("2", hidden, text, masks.get("encoder_attention_mask")) if self.two else hidden

    def _attend(self, which: str, hidden: Tensor, text: Tensor | None, mask: Tensor | None) -> Tensor:
        normed = self._in_block(f"norm{which}")(hidden)
        if self.placed:
            normed = self._in_block("pos_embed")(normed)
        attention = self._in_block(f"attn{which}")
        return attention(normed, encoder_hidden_states=text, attention_mask=mask) + hidden

    def _in_block(self, name: str) -> Any:
        return self.part(f"{self.block_path}.{name}")


class Mlp(Unit):
    """``norm3`` and the feed-forward part, added to its input."""

    def __init__(self, model: Any, origin: Origin, path: str) -> None:
        super().__init__(model, origin, f"{path}.norm3", f"{path}.ff")

    def forward(self, hidden: Tensor) -> Tensor:
        norm, ff = map(self.part, self.paths)
        return ff(norm(hidden)) + hidden


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The units that a transformer is cut into."""

    entry: type[Unit] = Entry
    attention: type[Attention] = Attention
    exit: type[Producer] = Exit
    ends_pop: tuple[str, ...] = ()  # what entry and exit pop besides the residual

    def transformer(self, model: Any, origin: Origin, path: str, given: Mapping[str, str]) -> Iterator[Declared]:
        """The layers of a ``Transformer2DModel`` or one like it; ``given`` is the named value for each argument."""
        residual = f"{path}.residual"
        yield spec(self.entry(model, origin, path), pop=self.ends_pop, stash=residual, name=f"{path}.entry")
        for index, _ in enumerate(model.get_submodule(path).transformer_blocks):
            yield from self.block(model, origin, f"{path}.transformer_blocks.{index}", given)
        yield spec(self.exit(model, origin, path), pop=(residual, *self.ends_pop), name=f"{path}.exit")

    def block(self, model: Any, origin: Origin, path: str, given: Mapping[str, str]) -> Iterator[Declared]:
        """Attention and MLP of a ``BasicTransformerBlock``."""
        norm = model.get_submodule(path).norm_type
        if norm != "layer_norm":
            raise GraphError(f"{path} has norm_type {norm!r}, supported: 'layer_norm'; use granularity=\"block\"")
        unit = self.attention(model, origin, path, reads=tuple(given))
        yield spec(unit, pop=tuple(given.values()), name=f"{path}.attention")
        yield spec(Mlp(model, origin, path), name=f"{path}.mlp")


def _tokens(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def _image(tokens: Tensor, like: Tensor) -> Tensor:
    return tokens.unflatten(1, like.shape[-2:]).permute(0, 3, 1, 2).contiguous()


def bias_of_mask(mask: Tensor, hidden: Tensor) -> Tensor:
    """A mask ``(batch, keys)`` of 1 = keep as what is added to attention scores."""
    return ((1 - mask.to(hidden.dtype)) * -10000.0).unsqueeze(1)
