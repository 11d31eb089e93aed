"""``Kandinsky3UNet`` as a layer list: one skip a level, stashed by the last resnet of a down block.

conv_in, down_blocks.0.resnets_in.0, [.attentions.1], .resnets_out.0, ... ──skip0──────┐
down_blocks.1.attentions.0, .resnets_in.0, ... ──skip1────────────────────────────┐    │
down_blocks.2..., up_blocks.0...                                                  │    │
up_blocks.1.resnets_in.0 ←────────────────────────────────────────────────────────┘    │
..., up_blocks.1.attentions.0, up_blocks.2.resnets_in.0 ←──────────────────────────────┘
..., conv_out
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from diffusers.models.unets import unet_kandinsky3 as blocks
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.unets.units import NO_REMEDY, Head, Part, SkipResnet, Stem
from deepspeed_pulse.models.unets.walk import Layers, Walk
from deepspeed_pulse.models.units import Origin, Piece, bias_of_mask, declare, same

TAKES_APART = (
    blocks.Kandinsky3UNet,
    blocks.Kandinsky3DownSampleBlock,
    blocks.Kandinsky3UpSampleBlock,
    blocks.Kandinsky3AttentionBlock,
)
MASK = "encoder_attention_mask"
TEXT_TOKENS = 128


def to_layers(model: Any, origin: Origin, *, fine: bool) -> Layers:
    """The layers of a ``Kandinsky3UNet``.

    The first layer's input is ``sample``. Batch entries that the layers pop: ``timestep``, ``encoder_hidden_states``
    and ``encoder_attention_mask`` (1 = keep), which the model cannot do without. Text is projected once; the projection
    travels, with its gradient.
    ``granularity="fine"`` cuts attention blocks into attention and MLP.
    """
    return Kandinsky3Walk(model, origin, fine=fine).layers()


class KandinskyStem(Stem):
    """``temb`` also holds the pooled text."""

    PARTS = (*Stem.PARTS[:-1], "add_time_condition", "conv_in")

    def entries(self, *, timestep_cond: bool) -> dict[str, bool]:
        return dict.fromkeys(("timestep", "encoder_hidden_states", MASK), True)

    def forward(self, sample: Tensor, *popped: Tensor) -> Any:
        entries = self.given(popped)
        temb = self.time(sample, entries)
        text = self.encoder_hid_proj(entries["encoder_hidden_states"])
        temb = self.add_time_condition(temb, text, bias_of_mask(entries[MASK], sample))
        return self.leave(self.conv_in(sample), temb, text)


class KandinskySkipResnet(SkipResnet):
    """The first resnet of an up block."""

    remedy = NO_REMEDY


class TextAttentionBlock(Part):
    """Attention to the text and MLP, both norms conditioned on the time."""

    def run(self, hidden: Tensor, temb: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        return self.part()(hidden, temb, text, bias_of_mask(mask, hidden))


class KandinskyAttention(Piece):
    """The first half of an attention block."""

    CHILDREN = ("in_norm", "attention")

    def forward(self, hidden: Tensor, temb: Tensor, text: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        pixels = self.block.in_norm(hidden, temb).flatten(2).permute(0, 2, 1)
        bias = None if mask is None else bias_of_mask(mask, hidden).to(pixels.dtype)
        output = self.block.attention(pixels, pixels if text is None else text, bias)
        return hidden + output.permute(0, 2, 1).unflatten(2, hidden.shape[-2:])


class KandinskyMlp(Piece, Part):
    """The second half."""

    CHILDREN = ("out_norm", "feed_forward")

    def run(self, hidden: Tensor, temb: Tensor) -> Tensor:
        return hidden + self.block.feed_forward(self.block.out_norm(hidden, temb))


class KandinskyHead(Head):
    """The activation has another name."""

    PARTS = ("conv_norm_out", "conv_act_out", "conv_out")


class Kandinsky3Walk(Walk):
    """Blocks of resnet, text attention, resnet, with self-attention at the outer end."""

    stem_kind = KandinskyStem
    head_kind = KandinskyHead

    def kinds(self) -> dict[type[nn.Module], Callable[[str], Layers]]:
        attention = {blocks.Kandinsky3AttentionBlock: self.attention}
        return {blocks.Kandinsky3ResNetBlock: lambda path: self.one(path, "temb"), **attention}

    def attention(self, path: str) -> Layers:
        within = path.endswith(".attentions.0")
        pop = ("temb",) if within else ("temb", self.text, MASK)
        if not self.fine:
            return self.one(path, *pop, kind=Part if within else TextAttentionBlock)
        attention, mlp = (kind(self.model, self.origin, path) for kind in (KandinskyAttention, KandinskyMlp))
        return [
            declare(attention, pop=same(*pop), name=f"{path}.attention"),
            declare(mlp, pop=same("temb"), name=f"{path}.mlp"),
        ]

    def encoder(self) -> Iterator[Layers]:
        before = self.stem()
        for index in range(self.model.num_levels - 1):
            yield [*before, *self._down(index)]
            before = []

    def middle(self) -> Layers:
        return self._down(self.model.num_levels - 1)

    def decoder(self) -> Iterator[Declared]:
        for index, block in enumerate(self.model.up_blocks):
            path = f"up_blocks.{index}"
            first, *rest = self._resnets(path, block)
            if index:
                [first] = self.one(f"{path}.resnets_in.0", self.waiting.pop(), "temb", kind=KandinskySkipResnet)
            yield from (first, *rest, *self._self_attention(path, block))

    def _down(self, index: int) -> Layers:
        path, block = f"down_blocks.{index}", self.model.down_blocks[index]
        return [*self._self_attention(path, block), *self._resnets(path, block)]

    def _resnets(self, path: str, block: Any) -> Layers:
        layers: Layers = []
        for index in range(len(block.resnets_in)):
            layers += self.part(f"{path}.resnets_in.{index}")
            if block.context_dim is not None:
                layers += self.part(f"{path}.attentions.{index + 1}")
            layers += self.part(f"{path}.resnets_out.{index}")
        return layers

    def _self_attention(self, path: str, block: Any) -> Layers:
        return self.part(f"{path}.attentions.0") if block.self_attention else []


def example(shapes: Shapes) -> dict[str, Any]:
    """The config has no size; the model was made for 1024 x 1024."""
    return {
        "sample": shapes.numbers(shapes.config.in_channels, 128, 128),
        "timestep": shapes.integers(),
        "encoder_hidden_states": shapes.numbers(TEXT_TOKENS, shapes.config.encoder_hid_dim),
        "encoder_attention_mask": shapes.integers(TEXT_TOKENS),
    }
