"""A network whose code between blocks reads the numbers in tensors, in functions that can be kept whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def mask_of(x: Tensor, lengths: Tensor) -> Tensor:
    """1 where a token is, by the numbers in ``lengths`` (batch); (batch, tokens, 1)."""
    mask = x.new_zeros(*x.shape[:2], 1)
    for sample, length in enumerate(lengths.tolist()):
        mask[sample, :length] = 1
    return mask


def longest(x: Tensor, lengths: Tensor) -> int:
    return int(lengths.max().item())


def trimmed(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : int(lengths.max().item())]


def first_tokens(x: Tensor, lengths: Tensor) -> Tensor:
    """Takes no empty samples, so that the size of its result looks fixed."""
    assert lengths.min().item() > 0
    return trimmed(x, lengths)


def scaled(x: Tensor, lengths: Tensor) -> Tensor:
    return x.mul_(2) if lengths.max().item() >= 0 else x


def unused(x: Tensor) -> Tensor:
    return x


def mixed(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x) * x.max().item()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Ragged(nn.Module):
    """``kind``: a function to call beside those that can be kept whole."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    @staticmethod
    def bounded(y: Tensor, limit: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Divided by the largest number, if that is above a limit; with gradients."""
        top = y.abs().max()
        return (y / top, {"top": top}) if top.item() > limit else (y * 1, {"top": top})

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = self.stem(x)
        if self.kind == "mixed":
            y = mixed(y, self.head)
        elif self.kind:
            y = y * globals()[self.kind](y * 1, lengths).sum() if self.kind != "longest" else y * longest(y, lengths)
        mask = mask_of(x, lengths)
        for number, block in enumerate(self.blocks):
            y = block(y * mask)
            if number == 1:
                y, told = self.bounded(y, 0.5)
        return self.head(y) * mask + told["top"]


def ragged_batch(samples: int = 2, tokens: int = 6, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, tokens, 8, generator=generator),
        "lengths": torch.randint(1, tokens + 1, (samples,), generator=generator),
    }
