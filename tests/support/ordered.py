"""Layers whose weights do not lie row by row in memory: in channels_last, transposed, with gaps, shared and tied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, SIDE, CLASSES = 6, 4, 5


class Kernel(nn.Module):
    """A convolution in channels_last, of 3x3 or of single points."""

    def __init__(self, channels: int = WIDTH, size: int = 3) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, WIDTH, size, padding=size // 2).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Turned(nn.Module):
    """Its weight is a transposed view, as a checkpoint of another layout is read."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(before, after) / 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.flatten(1) @ self.weight.t())


class Gapped(nn.Module):
    """Its weight is every other column of more, with a factor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.factor * x @ self.weight)


def ordered_layers() -> list[Any]:
    """A new instance with the same weights every time."""
    from deepspeed_pulse import TiedLayerSpec

    torch.manual_seed(0)
    shared = Kernel()
    ends = [TiedLayerSpec("ends", Kernel, tied_weight_attr=["inner.weight", "inner.bias"]) for _ in range(2)]
    return [
        Kernel(3),
        ends[0],
        shared,
        Kernel(size=1),
        Kernel().requires_grad_(False),
        shared,
        ends[1],
        Turned(WIDTH * SIDE * SIDE, WIDTH),
        Gapped(),
        Turned(WIDTH, CLASSES),
    ]


def ordered_batch(step: int, microbatch: int, data_index: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    return torch.randn(2, 3, SIDE, SIDE, generator=generator), torch.randn(2, CLASSES, generator=generator)
