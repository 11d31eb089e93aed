"""Small models with real arithmetic, for the sides of slow_network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from small_models import small_unet

from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.transformers.uvit import UViTModel

SAMPLES, SIZE = 4, 16
"""Of a microbatch, and of a latent."""


def unet() -> UNet2DConditionModel:
    return small_unet(sample_size=SIZE, width=64)


def unet_inputs(samples: int) -> dict[str, torch.Tensor]:
    return {
        "sample": torch.randn(samples, 4, SIZE, SIZE),
        "timestep": torch.randint(0, 1000, (samples,)),
        "encoder_hidden_states": torch.randn(samples, 16, 64),
    }


def uvit() -> UViTModel:
    """13 blocks and 6 skips, 64 tokens."""
    return UViTModel(sample_size=SIZE, patch_size=2, hidden_size=192, num_layers=12, num_attention_heads=6)


def uvit_inputs(samples: int) -> dict[str, torch.Tensor]:
    return {"sample": torch.randn(samples, 4, SIZE, SIZE), "timestep": torch.randint(0, 1000, (samples,))}


MODELS: dict[str, tuple[str, Callable[[], Any], Callable[[int], dict[str, torch.Tensor]]]] = {
    "unet": ("U-Net like Stable Diffusion's, narrow", unet, unet_inputs),
    "uvit": ("U-ViT, small", uvit, uvit_inputs),
}
"""Title, model, inputs: the first of them is the first layer's."""


class Relaying(torch.nn.Module):
    """A layer of a list with names among layers that hand on a tuple: hidden state and all that later ones read.

    Args:
        alive: names of the values that come in, in order; leaving: those that no later layer reads.
        every: each floating value gets a gradient, as upstream differentiates all of a tuple that ranks hand on.
    """

    def __init__(self, layer: Any, alive: tuple[str, ...], leaving: frozenset[str], every: bool) -> None:
        super().__init__()
        self.every = every
        self.layer, self.stash, self.pop = layer.layer, layer.stash, layer.pop
        self.alive, self.leaving = alive, leaving

    def forward(self, inputs: Any) -> Any:
        hidden, *values = inputs if isinstance(inputs, tuple) else (inputs,)
        have = dict(zip(self.alive, values, strict=True))
        for value in have.values() if self.every else ():
            if value.is_floating_point() and not value.requires_grad:
                value.requires_grad_()
        made = self.layer(hidden, *(have[name] for name in self.pop))
        hidden, *stashed = made if self.stash else (made,)
        have |= zip(self.stash, stashed, strict=True)
        kept = [value for name, value in have.items() if name not in self.leaving]
        return (hidden, *kept) if kept else hidden


@dataclass(frozen=True, kw_only=True)
class RealCase:
    """As ``slow_network.cases.Case``, for two ranks."""

    name: str
    ranks: int = 2
    microbatches: int = 4
    byte_scale: float = 1.0

    @property
    def title(self) -> str:
        return MODELS[self.name][0]

    def named(self) -> list[Any]:
        torch.manual_seed(0)
        return list(to_layers(MODELS[self.name][1]()))

    def relaying(self) -> list[tuple[Any, ...]]:
        return self._handing_on(every=True)

    def whole(self) -> list[tuple[Any, ...]]:
        """Without gradients that nobody needs, as of text embeddings."""
        return self._handing_on(every=False)

    def _handing_on(self, *, every: bool) -> list[tuple[Any, ...]]:
        layers = self.named()
        last_reader = {name: index for index, layer in enumerate(layers) for name in layer.pop}
        alive = tuple(self._entries(1))[1:]
        made: list[tuple[Any, ...]] = []
        for index, layer in enumerate(layers):
            here = (*alive, *layer.stash)
            leaving = frozenset(name for name in here if last_reader[name] == index)
            made.append((Relaying, layer, alive, leaving, every))
            alive = tuple(name for name in here if name not in leaving)
        return made

    def batch(self, microbatches: int = 1) -> Any:
        """Inputs as a tuple, and a label."""
        inputs, label = self.named_batch(microbatches)
        return tuple(inputs.values()), label

    def named_batch(self, microbatches: int = 1) -> Any:
        return self._entries(microbatches * SAMPLES), torch.randn(microbatches * SAMPLES, 4, SIZE, SIZE)

    def _entries(self, samples: int) -> dict[str, torch.Tensor]:
        return MODELS[self.name][2](samples)
