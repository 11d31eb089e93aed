"""A network whose batches are nested dicts: bools, integers, constant floats, tuples, None, scalars, strings."""

from __future__ import annotations

from typing import Any

import torch
from support.toy import WIDTH
from torch import nn


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.inner(x) + self.text(text))
        return h, h


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x) + self.table(ids)).masked_fill(mask[:, None], 0.0)


class Rotated(nn.Module):
    """Reads a pair of tables as one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = tables
        return torch.tanh(self.inner(x)) * cos + x.flip(-1) * sin


class Scaled(nn.Module):
    """Reads a number and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, factor: float, how: str) -> torch.Tensor:
        return getattr(torch, how)(self.inner(x)) * factor


class Out(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cat([x, skip], dim=-1))


def nested_layers() -> list[Any]:
    """Eight layers that read tensors only."""
    from deepspeed_pulse import LayerSpec

    return [
        LayerSpec(Embed, pop="added.text", stash="skip"),
        LayerSpec(Masked, pop=("mask", "added.deep.ids")),
        LayerSpec(Rotated, pop="rotary"),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(Masked, pop=("mask", "added.deep.ids")),
        LayerSpec(Rotated, pop="rotary"),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(Out, pop="skip"),
    ]


def scalar_layers() -> list[Any]:
    """The same, and two layers that read a number and a word."""
    from deepspeed_pulse import LayerSpec

    found = nested_layers()
    for position in (1, 6):
        found.insert(position, LayerSpec(Scaled, pop=("added.factor", "how")))
    return found


def nested_batch(step: int, microbatch: int, data_index: int, size: int = 2) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    angles = torch.rand(WIDTH, generator=generator)
    inputs = {
        "mask": torch.rand(size, generator=generator) > 0.5,
        "latents": {"noisy": torch.randn(size, WIDTH, generator=generator), "clean": None},
        "added": {
            "text": torch.randn(size, 3, generator=generator),
            "deep": {"ids": torch.randint(0, 5, (size,), generator=generator), "none": None},
            "factor": 0.5 + step,
        },
        "rotary": [angles.cos().requires_grad_(), angles.sin()],  # as scripts with reentrant checkpoints ask for it
        "how": "tanh",
        "captions": [f"picture {step}"] * (1 + microbatch),
    }
    return inputs, torch.randn(size, 3, generator=generator)
