"""A toy that reads an estimate of its own output, and what it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support.toy import WIDTH, toy_batch, toy_layers
from torch import nn

ENTRY = "x_self_cond"


class Conditioned(nn.Module):
    """A layer of the toy that also reads an estimate, in its input's form."""

    def __init__(self, build: Any, dropout: float) -> None:
        super().__init__()
        self.inner, self.mix, self.drop = build(), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, estimate: torch.Tensor, *popped: torch.Tensor) -> Any:
        return self.inner(self.drop(x + torch.sin(self.mix(estimate))), *popped)


class Wide(nn.Module):
    """The last layer, whose output is as wide as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cat([x, skip], dim=-1))


def conditioned_layers(readers: Sequence[int] = (0,), dropout: float = 0.0) -> list[Any]:
    """The toy, some of whose layers pop an estimate before anything else."""
    from deepspeed_pulse import LayerSpec

    layers = toy_layers()
    layers[-1] = LayerSpec(Wide, pop="s0")
    for index in readers:
        one = layers[index]
        layers[index] = LayerSpec(Conditioned, one.typename, dropout, pop=(ENTRY, *one.pop), stash=one.stash)
    return layers


def estimate(output: torch.Tensor, entries: Any) -> torch.Tensor:
    """Of x from what was predicted, as samplers do: it reads the input and an entry of the batch."""
    return entries["hidden"] - entries["t"] * output


def batch_of(step: int, microbatch: int, replica: int = 0, size: int = 2) -> Any:
    inputs, _ = toy_batch(step, microbatch, replica, size)
    del inputs["unused"]
    return inputs, inputs["hidden"] * 0.5 + inputs["t"]


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, labels)
