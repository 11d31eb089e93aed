"""Layer lists in which one weight has several places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Pushing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, torch.sin(y)


class Popping(Block):
    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * skip)


class Transposed(nn.Module):
    """Reads a weight the other way round."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Idle(nn.Module):
    """Holds a module that it does not call."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Table(nn.Module):
    """Adds a table of numbers, a buffer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("numbers", torch.randn(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.scale(x + (self.numbers * self.mask).to(x.dtype)))


def blocks() -> list[Any]:
    return [Block() for _ in range(8)]


def listed_twice() -> list[Any]:
    layers = blocks()
    layers[6] = layers[1]
    return layers


def first_and_last() -> list[Any]:
    """An embedding's weight in the head."""
    layers = blocks()
    layers[0] = nn.Linear(WIDTH, WIDTH, bias=False)
    layers[7] = Transposed(layers[0].weight)
    return layers


def assigned() -> list[Any]:
    """``b.weight = a.weight``, at two pairs of layers, one of them crossing the other."""
    layers = blocks()
    layers[5].inner.weight = layers[1].outer.weight
    layers[6].outer.bias = layers[3].inner.bias
    return layers


def submodule() -> list[Any]:
    layers = blocks()
    layers[7].inner = layers[2].inner
    return layers


def three_places() -> list[Any]:
    """Two of them in one layer, under two names."""
    layers = blocks()
    layers[3].inner.weight = layers[4].inner.weight = layers[4].outer.weight = layers[0].inner.weight
    return layers


def everywhere() -> list[Any]:
    """One block, eight times."""
    return [Block()] * 8


def unused() -> list[Any]:
    layers = blocks()
    layers[7] = Idle(layers[0])
    return layers


def frozen() -> list[Any]:
    """Shared and frozen in part; and the last layers hold nothing that trains but what they share."""
    layers = blocks()
    layers[6] = layers[0]
    layers[0].inner.requires_grad_(False)
    layers[7].requires_grad_(False)
    return layers


def with_tied_spec() -> list[Any]:
    from deepspeed_pulse import LayerSpec, TiedLayerSpec

    layers = listed_twice()
    layers[0] = TiedLayerSpec("block", Block, tied_weight_attr="inner.weight")
    layers[4] = LayerSpec(Block)
    layers[7] = TiedLayerSpec("block", Block, tied_weight_attr="inner.weight")
    return layers


def with_names() -> list[Any]:
    """A named value between the two places of a weight; the module that has both stashes and pops."""
    from deepspeed_pulse import spec

    layers = blocks()
    pushing, popping = Pushing(), Popping()
    popping.inner = pushing.inner
    layers[0], layers[7] = spec(pushing, stash="skip", name="push"), spec(popping, pop="skip", name="pop")
    layers[5] = layers[2]
    return layers


def tables() -> list[Any]:
    """A module with buffers, listed twice."""
    layers = blocks()
    layers[1] = layers[5] = Table()
    return layers


MODELS: dict[str, Callable[[], list[Any]]] = {
    "listed twice": listed_twice,
    "first and last": first_and_last,
    "assigned": assigned,
    "submodule": submodule,
    "three places": three_places,
    "everywhere": everywhere,
    "unused": unused,
    "frozen": frozen,
    "with a tied spec": with_tied_spec,
    "with names": with_names,
    "tables": tables,
}


def batch(step: int, microbatch: int, data_index: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)
