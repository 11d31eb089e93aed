"""A network of 10 layers: 4 nested skips, one value with 3 consumers, a tied layer, batch entries.

Layer 0 passes the same tensor on as hidden state and as skip, so its two gradients add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:  # ranks of plain DeepSpeed, which must not load this package, use the layers too
    from deepspeed_pulse.ir.profile import Profile

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


def toy_profile(microbatch_size: int = 1) -> Profile:
    """Every layer as long as the others; a tensor is as wide as the hidden state, and a layer keeps two of them."""
    from deepspeed_pulse.engine.plans.costs import parameters_of
    from deepspeed_pulse.engine.specs import describe
    from deepspeed_pulse.ir.graph import Graph
    from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
    from deepspeed_pulse.runtime.state import param_bytes

    layers = toy_layers()
    graph = Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(layers)))
    size = 4 * WIDTH * microbatch_size
    cost = {"forward_ms": 1.0, "backward_ms": 2.0, "activation_bytes": 2 * size, "output_bytes": size}
    return Profile(
        name="toy",
        device="cpu",
        dtype="float32",
        microbatch_size=microbatch_size,
        layers=tuple(
            LayerCost(name=declared.name, param_bytes=param_bytes(parameters_of(layer)), **cost)
            for declared, layer in zip(graph.layers, layers, strict=True)
        ),
        skips=tuple(
            Skip(name=value.name, source=value.source or 0, target=target, bytes=size)
            for value in graph.values
            for target in value.targets
        ),
    )


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
