"""Adapters as kohya's and LyCORIS's are put on: their forward takes the place of a layer's, and no model knows them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Patch(nn.Module):
    """Adds two small matrices' product to what a linear layer gives."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.lora_down = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, linear.out_features, bias=False)
        self.org_forward = linear.forward
        linear.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.org_forward(x) + self.lora_up(self.lora_down(x))  # type: ignore[no-any-return]


def register_patches(model: nn.Module) -> None:
    """As docs/how_to/lora.md says."""
    for module in list(model.modules()):
        forward = vars(module).get("forward")
        if forward is not None:
            module.add_module("lora", forward.__self__)


class Blocks(nn.Module):
    """Blocks whose checkpoints are reentrant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([_Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]


def patched_blocks() -> Blocks:
    """Frozen, with such adapters, registered."""
    model = Blocks().requires_grad_(False)
    for block in model.blocks:
        Patch(block.inner[0])
    register_patches(model)
    return model


def flagged_batch(size: int = 0) -> dict[str, Tensor]:
    """As kohya's scripts have it, so that reentrant checkpoints of the first blocks give gradients."""
    return {"x": torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()}
