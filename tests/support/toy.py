"""A network of 10 layers: 4 nested skips, one value with 3 consumers, a tied layer, batch entries.

Layer 0 passes the same tensor on as hidden state and as skip, so its two gradients add up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 8


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.embed = nn.Linear(WIDTH, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.inner(x))
        return h, h, torch.sin(self.embed(t))


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.inner(x))
        return h + x, h


class DownTime(Down):
    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x + temb)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: torch.Tensor, c: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x + self.table(c))) * temb


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(torch.cat([x, skip], dim=-1))) + x


class UpTime(Up):
    def forward(self, x: torch.Tensor, skip: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * temb, skip)


class Square(nn.Module):
    """The tied module: one weight, used forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cat([x, skip], dim=-1))


def transposed(module: Square, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ module.weight.t())


def stashing(module: Square, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = module(x)
    return x + h, h


def toy_layers() -> list[Any]:
    from deepspeed_pulse import LayerSpec, TiedLayerSpec

    return [
        LayerSpec(First, pop="t", stash=("s0", "temb")),
        TiedLayerSpec("square", Square, forward_fn=stashing, stash="s1"),
        LayerSpec(DownTime, pop="temb", stash="s2"),
        LayerSpec(Down, stash="s3"),
        LayerSpec(Middle, pop=("c", "temb")),
        TiedLayerSpec("square", Square, forward_fn=transposed),
        LayerSpec(Up, pop="s3"),
        LayerSpec(UpTime, pop=("s2", "temb")),
        LayerSpec(Up, pop="s1"),
        LayerSpec(Last, pop="s0"),
    ]


def toy_batch(step: int, microbatch: int, data_index: int, size: int = 2) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    inputs = {
        "hidden": torch.randn(size, WIDTH, generator=generator),
        "t": torch.rand(size, 1, generator=generator),
        "c": torch.randint(0, 5, (size,), generator=generator),
        "unused": torch.zeros(1),
    }
    return inputs, torch.randn(size, 3, generator=generator)


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, labels)
