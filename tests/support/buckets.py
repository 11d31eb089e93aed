"""Batches whose shapes change from one microbatch to the next: sequences and resolution buckets."""

from __future__ import annotations

from typing import Any

import torch
from support.small_unet import unet_batch
from torch import nn

WIDTH = 8
LENGTHS = (3, 5, 2, 7, 4)
RESOLUTIONS = ((16, 16), (16, 24), (24, 16), (8, 32))

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Tokens(nn.Module):
    """A layer between tuples: states, integers and bools side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, state: State) -> State:
        x, ids, mask = state
        h = torch.tanh(self.inner(x) + self.table(ids))
        return x + h.masked_fill(mask[..., None], 0.0), ids.roll(1, dims=-1), mask


class Stashing(Tokens):
    def forward(self, state: State) -> tuple[State, tuple[torch.Tensor, torch.Tensor]]:  # type: ignore[override]
        x, ids, mask = super().forward(state)
        return (x, ids, mask), (x[:, ::2], ids)


class Pooled(nn.Module):
    """Pops a pair of another length than the state's; what leaves has no length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, 3), nn.Embedding(5, WIDTH)

    def forward(self, state: State, skip: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        half, ids = skip
        return self.inner(state[0].mean(1) + half.mean(1) + self.table(ids).sum(1))


def token_layers() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    middle = [LayerSpec(Tokens) for _ in range(6)]
    return [LayerSpec(Stashing, stash="skip"), *middle, LayerSpec(Pooled, pop="skip")]


def bucket(step: int, microbatch: int, data_index: int, count: int) -> int:
    """Some shapes come back, some steps have several, pipelines have different ones."""
    return (step * step + microbatch * (step % 2) + data_index) % count


def token_batch(step: int, microbatch: int, data_index: int) -> Any:
    length = LENGTHS[bucket(step, microbatch, data_index, len(LENGTHS))]
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    x = torch.randn(2, length, WIDTH, generator=generator)
    ids = torch.randint(0, 5, (2, length), generator=generator)
    return {"hidden": (x, ids, ids == 2)}, torch.randn(2, 3, generator=generator)


def unet_bucket(step: int, microbatch: int, data_index: int) -> Any:
    inputs, _ = unet_batch(step, microbatch, data_index)
    height, width = RESOLUTIONS[bucket(step, microbatch, data_index, len(RESOLUTIONS))]
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    sample, labels = torch.randn(2, 2, 4, height, width, generator=generator)
    return {**inputs, "sample": sample}, labels
