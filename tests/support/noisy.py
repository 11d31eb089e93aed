"""A network with dropout in every layer; its random numbers follow from layer and microbatch under ``seed_layers``."""

from __future__ import annotations

from typing import Any

import torch
from support.toy import WIDTH
from torch import nn


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(torch.tanh(self.inner(x)), 0.3, self.training)


class Stashing(Noisy):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        h = super().forward(x)
        return h, nn.functional.dropout(h, 0.3, self.training)


class Popping(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, width)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(torch.cat([x, skip], dim=-1)), 0.3, self.training)


def noisy_layers() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    return [
        LayerSpec(Stashing, stash="a"),
        LayerSpec(Noisy),
        LayerSpec(Stashing, stash="b"),
        LayerSpec(Noisy),
        LayerSpec(Noisy),
        LayerSpec(Popping, pop="b"),
        LayerSpec(Noisy),
        LayerSpec(Popping, 3, pop="a"),
    ]


def noisy_batch(step: int, microbatch: int, data_index: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, 3, generator=generator)
