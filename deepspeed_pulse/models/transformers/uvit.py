"""U-ViT: a plain transformer over patches with the long skips of a U-Net, as a diffusers model and as a layer list.

    embedding
    in_blocks.0 ──skip0───────────────────┐
    ...                                   │
    in_blocks.n-1 ──skip──────┐           │
    mid_block                 │           │
    out_blocks.0 ←────────────┘           │
    ...                                   │
    out_blocks.n-1 ←──────────────────────┘
    head

Time, class and text are tokens beside the patches, so that nothing but the skips jumps over layers.
Written from F. Bao et al., "All are Worth Words: A ViT Backbone for Diffusion Models", CVPR 2023: the skip
is joined by ``Linear(concatenation)``, and a 3x3 convolution follows the projection to pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.errors import BatchError, ConfigError, did_you_mean
from deepspeed_pulse.models.catalogue.published import UVIT_SIZES as SIZES
from deepspeed_pulse.models.shapes import Shapes
from deepspeed_pulse.models.transformers.units import unpatchify
from deepspeed_pulse.models.units import Origin, Whole, declare, same


class UViTModel(ModelMixin, ConfigMixin):
    """The whole model.

    Args:
        sample_size: height and width of a sample; positions are learned, so it is fixed.
        patch_size: side of a patch.
        in_channels: channels of a sample, and of the output.
        hidden_size: width.
        num_layers: blocks on the way in and out together, the middle one not counted; even.
        num_attention_heads: has to divide ``hidden_size``.
        mlp_ratio: inner width of a feed-forward over ``hidden_size``.
        num_classes: classes (with the one that means "no class"), or None for a model without class token.
        text_dim: width of text states, or None for a model without text.
        num_text_tokens: text states of a sample.
    """

    @register_to_config
    def __init__(
        self,
        sample_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        num_layers: int = 28,
        num_attention_heads: int = 16,
        mlp_ratio: float = 4.0,
        num_classes: int | None = None,
        text_dim: int | None = None,
        num_text_tokens: int = 77,
    ) -> None:
        super().__init__()
        for name, value, divisor in (
            ("sample_size", sample_size, patch_size),
            ("num_layers", num_layers, 2),
            ("hidden_size", hidden_size, num_attention_heads),
        ):
            if value % divisor:
                raise ConfigError(f"UViTModel: expected {name} to be a multiple of {divisor}, found {value}")
        block = partial(Block, hidden_size, num_attention_heads, int(hidden_size * mlp_ratio))
        self.embedding = Embedding(self.config)
        self.in_blocks = nn.ModuleList(block() for _ in range(num_layers // 2))
        self.mid_block = block()
        self.out_blocks = nn.ModuleList(block(skip=True) for _ in range(num_layers // 2))
        self.head = Head(hidden_size, patch_size, in_channels, sample_size // patch_size)
        self.apply(_initialise)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DOutput | tuple[Tensor]:
        """Predict the noise of ``sample``.

        Args:
            sample: (batch, channels, height, width).
            timestep: (batch,), or one for all.
            class_labels: (batch,) integers, when the model has classes.
            encoder_hidden_states: (batch, text tokens, text_dim), when the model has text.

        Raises:
            BatchError: classes, text or the sample are not what the model was made for.
        """
        hidden = self.embedding(sample, timestep, class_labels, encoder_hidden_states)
        skips = []
        for block in self.in_blocks:
            hidden = block(hidden)
            skips.append(hidden)
        hidden = self.mid_block(hidden)
        for block in self.out_blocks:
            hidden = block(hidden, skips.pop())
        output = self.head(hidden)
        return UNet2DOutput(sample=output) if return_dict else (output,)


def uvit(size: str, **overrides: Any) -> UViTModel:
    """A new model of one of the :data:`SIZES`; ``overrides`` replace entries of its configuration."""
    if size not in SIZES:
        raise ConfigError(f"uvit(): expected one of {', '.join(SIZES)}, found {size!r}{did_you_mean(size, SIZES)}")
    return UViTModel(**{**SIZES[size], **overrides})


class Embedding(nn.Module):
    """One token for the time, one for the class, one for each text state and patch, and their learned positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, side = config.hidden_size, config.sample_size // config.patch_size
        self.sample_shape = (config.in_channels, config.sample_size, config.sample_size)
        self.width, self.text_shape = width, (config.num_text_tokens, config.text_dim)
        num_text = config.num_text_tokens if config.text_dim is not None else 0
        num_tokens = 1 + (config.num_classes is not None) + num_text + side * side
        self.patches = nn.Conv2d(config.in_channels, width, config.patch_size, stride=config.patch_size)
        self.classes = nn.Embedding(config.num_classes, width) if config.num_classes is not None else None
        self.text = nn.Linear(config.text_dim, width) if config.text_dim is not None else None
        self.positions = nn.Parameter(torch.empty(1, num_tokens, width))
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:
        self._check(sample, class_labels, encoder_hidden_states)
        time = torch.as_tensor(timestep, device=sample.device).expand(sample.shape[0])
        waves = get_timestep_embedding(time, self.width, flip_sin_to_cos=True, downscale_freq_shift=0)
        tokens = [waves.to(self.positions.dtype)[:, None]]
        if self.classes is not None:
            tokens.append(self.classes(class_labels)[:, None])
        if self.text is not None:
            tokens.append(self.text(encoder_hidden_states))
        tokens.append(self.patches(sample).flatten(2).transpose(1, 2))
        return torch.cat(tokens, dim=1) + self.positions

    def _check(self, sample: Tensor, labels: Tensor | None, text: Tensor | None) -> None:
        expected: list[tuple[str, tuple[int, ...] | None, Tensor | None]] = [("sample", self.sample_shape, sample)]
        expected += [("class_labels", () if self.classes is not None else None, labels)]
        expected += [("encoder_hidden_states", self.text_shape if self.text is not None else None, text)]
        for name, shape, found in expected:
            wanted = None if shape is None else (sample.shape[0], *shape)
            got = None if found is None else tuple(found.shape)
            if wanted != got:
                raise BatchError(f"UViTModel: {name}: expected {_told(wanted)}, found {_told(got)}")


def _told(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"shape {list(shape)}"


class Attention(nn.Module):
    """``hidden + attention(norm(hidden))``; with a long skip, that is joined to ``hidden`` first."""

    def __init__(self, width: int, num_heads: int, *, skip: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.join = nn.Linear(2 * width, width) if skip else None
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.join is not None:
            assert skip is not None, "a block on the way out is given its skip"
            hidden = self.join(torch.cat([hidden, skip], dim=-1))
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """``hidden + mlp(norm(hidden))``."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, num_heads: int, inner: int, *, skip: bool = False) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads, skip=skip)
        self.mlp = FeedForward(width, inner)

    def forward(self, hidden: Tensor, skip: Tensor | None = None) -> Tensor:
        return self.mlp(self.attention(hidden, skip))


class Head(nn.Module):
    """Patches back to a picture; the other tokens are dropped."""

    def __init__(self, width: int, patch_size: int, channels: int, side: int) -> None:
        super().__init__()
        self.patch_size, self.side = patch_size, side
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, patch_size * patch_size * channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = self.project(self.norm(hidden))[:, -self.side * self.side :]
        return self.conv(unpatchify(tokens, (self.side, self.side), (self.patch_size, self.patch_size)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if (bias := getattr(module, "bias", None)) is not None:
            nn.init.zeros_(bias)


TAKES_APART = (UViTModel, Block)


def to_layers(model: UViTModel, origin: Origin, *, fine: bool) -> Iterator[Declared]:
    """The layers of a U-ViT.

    The first layer's input is ``sample``. Batch entries that it pops: ``timestep``; ``class_labels`` and
    ``encoder_hidden_states`` when the model has classes or text. With ``granularity="fine"`` the attention
    of a block is one layer and its feed-forward another.
    """
    classes = ("class_labels",) if model.embedding.classes is not None else ()
    text = ("encoder_hidden_states",) if model.embedding.text is not None else ()
    yield declare(Whole(model, origin, "embedding"), pop=same("timestep", *classes, *text))
    skips = [f"skip{index}" for index in range(len(model.in_blocks))]
    rows: list[tuple[str, str | None, str | None]] = [(f"in_blocks.{i}", None, skip) for i, skip in enumerate(skips)]
    rows += [("mid_block", None, None)]
    rows += [(f"out_blocks.{i}", skip, None) for i, skip in enumerate(reversed(skips))]
    for path, popped, stashed in rows:
        pop = {"skip": popped} if popped else {}
        if fine:
            yield declare(Whole(model, origin, f"{path}.attention"), pop=pop)
            yield declare(Whole(model, origin, f"{path}.mlp"), skip=stashed)
        else:
            yield declare(Whole(model, origin, path), pop=pop, skip=stashed)
    yield declare(Whole(model, origin, "head"))


def example(shapes: Shapes) -> dict[str, Any]:
    config = shapes.config
    batch = {"sample": shapes.numbers(config.in_channels, *shapes.sides), "timestep": shapes.integers()}
    if config.num_classes is not None:
        batch["class_labels"] = shapes.integers()
    if config.text_dim is not None:
        batch["encoder_hidden_states"] = shapes.numbers(config.num_text_tokens, config.text_dim)
    return batch
