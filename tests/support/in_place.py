"""Models whose layers change tensors in place, as torchvision's do, or in ways that later layers see."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIDE, WIDTH, CLASSES = 8, 6, 3


class Keep(nn.Module):
    """Stashes the very tensor that goes on as hidden state."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(trains)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return y, y


class Apart(nn.Module):
    """Goes on without a gradient; what it stashes is the same memory with one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return y.detach(), y


class Rescale(nn.Module):
    """Changes its input, and gives back what it pops."""

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return value


class Add(nn.Module):
    """Adds what it pops, which it may change first."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.inner, self.changes = nn.Linear(WIDTH, WIDTH), changes

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.changes:
            value.mul_(0.5)
        return torch.sin(self.inner(x)) + value


class Residual(nn.Module):
    """The input itself, with more in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += torch.tanh(self.inner(x.clone()))
        return x


def normalised(weight: torch.Tensor) -> torch.Tensor:
    """Rows of length one, as EDM2 divides them."""
    return weight / (1e-4 + weight.norm(dim=1, keepdim=True))


class Normalised(nn.Linear):
    """Its weight is normalised in every forward of training, and once more where it is used."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after)
        with torch.no_grad():
            self.weight.copy_(normalised(torch.randn(after, before)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(normalised(self.weight))
        return torch.tanh(nn.functional.linear(x, normalised(self.weight), self.bias))


def alexnet_layers() -> list[Any]:
    """As upstream's pipeline tutorial cuts torchvision's AlexNet: every ReLU a layer, in place."""
    from deepspeed_pulse import LayerSpec

    return [
        LayerSpec(nn.Conv2d, 3, 4, 3, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.MaxPool2d, 2),
        LayerSpec(nn.Conv2d, 4, 6, 3, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.Conv2d, 6, 6, 3, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.AdaptiveAvgPool2d, 1),
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, 6, 8),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.Linear, 8, CLASSES),
    ]


def seen_layers() -> list[Any]:
    """What is changed in place is read later: stashes, popped values, a batch entry."""
    from deepspeed_pulse import LayerSpec

    return [
        LayerSpec(Keep, False, stash="frozen"),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(Keep, True, stash="trained"),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(Residual),
        LayerSpec(Add, True, pop="cond"),
        LayerSpec(Add, False, pop="frozen"),
        LayerSpec(Add, False, pop="cond"),
        LayerSpec(Add, False, pop="trained"),
        LayerSpec(Residual),
        LayerSpec(Add, False, pop="frozen"),
        LayerSpec(nn.Linear, WIDTH, CLASSES),
    ]


def apart_layers() -> list[Any]:
    """One piece of memory, with a gradient and without."""
    from deepspeed_pulse import LayerSpec

    return [
        LayerSpec(Apart, stash="with gradient"),
        LayerSpec(Rescale, pop="with gradient"),
        *(LayerSpec(nn.Linear, WIDTH, width) for width in (WIDTH, WIDTH, CLASSES)),
    ]


def statistics_layers() -> list[Any]:
    """Running statistics, which a layer that runs again must not move again."""
    from deepspeed_pulse import LayerSpec

    return [
        layer
        for width in (3, 4, 4, 4)
        for layer in (
            LayerSpec(nn.Conv2d, width, 4, 3, padding=1),
            LayerSpec(nn.BatchNorm2d, 4),
            LayerSpec(nn.ReLU, inplace=True),
        )
    ] + [LayerSpec(nn.AdaptiveAvgPool2d, 1), LayerSpec(nn.Flatten), LayerSpec(nn.Linear, 4, CLASSES)]


def normalised_layers() -> list[Any]:
    """Weights that their own layers change."""
    from deepspeed_pulse import LayerSpec

    return [*(LayerSpec(Normalised, WIDTH, WIDTH) for _ in range(8)), LayerSpec(Normalised, WIDTH, CLASSES)]


def picture_batch(step: int, microbatch: int, data_index: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    pictures = torch.randn(2, 3, SIDE, SIDE, generator=generator)
    return pictures, torch.randn(2, CLASSES, generator=generator)


def vector_batch(step: int, microbatch: int, data_index: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    hidden, cond = (torch.randn(2, WIDTH, generator=generator) for _ in range(2))
    return {"hidden": hidden, "cond": cond}, torch.randn(2, CLASSES, generator=generator)


MODELS = {
    "in place alexnet": (alexnet_layers, picture_batch, "hidden"),
    "in place seen": (seen_layers, vector_batch, "hidden"),
    "in place apart": (apart_layers, vector_batch, "hidden"),
    "in place statistics": (statistics_layers, picture_batch, "hidden"),
    "in place normalised": (normalised_layers, vector_batch, "hidden"),
}
