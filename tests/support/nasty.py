"""Legal layer lists that trip up a pipeline: in place, views, aliases, shared, frozen, detached, random, with buffers.

A network is drawn from a number and made twice, for the reference and for the plan. What a layer does is put together
from small parts: how it treats its input, what it does with what it pops, what it stashes and what it returns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

WIDTH, ROWS = 4, 3

BODIES = (
    "linear",
    "linear",
    "tanh",
    "frozen",
    "relu_",
    "add_",
    "part_",
    "residual_",
    "identity",
    "view",
    "transposed",
    "dropout",
    "dropout_",
    "norm",
    "counter",
    "power",
    "detached",
    "single",
    "hooked",
    "gradient hook",
    "shared",
    "inner checkpoint",
)
STASHES = ("output", "input", "own", "view", "detached", "integers", "pair", "mask", "popped", "part")
POPS = ("add", "add", "multiply", "change_", "scale_", "blind", "return")


@dataclass(frozen=True)
class Odd:
    """One layer: what it computes, how it uses each value that it pops, what it stashes."""

    body: str
    pops: tuple[tuple[str, str], ...] = ()
    stashes: tuple[tuple[str, str], ...] = ()
    trains: bool = True


@dataclass(frozen=True)
class Network:
    layers: tuple[Odd, ...]
    entries: tuple[str, ...] = field(default=("cond", "ids"))

    @property
    def sources(self) -> dict[str, int]:
        return {name: i for i, layer in enumerate(self.layers) for name, _ in layer.stashes}


def draw_network(number: int, num_layers: int, bodies: Sequence[str] = BODIES) -> Network:
    """A network of so many layers; the last one trains, so that there is a loss to differentiate."""
    rng = random.Random(number)
    chosen = [rng.choice(bodies) for _ in range(num_layers - 1)] + ["linear"]
    values = [f"v{i}" for i in range(rng.randint(0, 5))] if num_layers > 1 else []
    pops: dict[int, list[tuple[str, str]]] = {}
    stashes: dict[int, list[tuple[str, str]]] = {}
    for name in values:
        source = rng.randrange(num_layers - 1)
        targets = rng.sample(range(source + 1, num_layers), min(rng.choice((1, 1, 2, 3)), num_layers - 1 - source))
        stashes.setdefault(source, []).append((name, rng.choice(STASHES)))
        for target in targets:
            pops.setdefault(target, []).append((name, rng.choice(POPS)))
    for name, use in (("cond", POPS), ("ids", ("multiply", "blind"))):
        for target in rng.sample(range(num_layers), min(num_layers, rng.choice((0, 1, 2)))):
            pops.setdefault(target, []).append((name, rng.choice(use)))
    frozen = rng.randrange(num_layers) if rng.random() < 0.3 else 0
    layers = [
        Odd(
            body=body,
            pops=tuple(pops.get(i, ())),
            stashes=tuple(stashes.get(i, ())),
            trains=i == num_layers - 1 or (i >= frozen and rng.random() > 0.1),
        )
        for i, body in enumerate(chosen)
    ]
    return Network(tuple(layers))


class Layer(nn.Module):
    """Runs one :class:`Odd`."""

    def __init__(self, odd: Odd, shared: nn.Linear) -> None:
        super().__init__()
        self.odd = odd
        self.linear = shared if odd.body == "shared" else nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if odd.body == "norm" else None
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("power", torch.ones(WIDTH))
        if odd.body == "hooked":
            self.linear.register_forward_hook(lambda module, args, output: output * 1.5)
        if not odd.trains:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor, *popped: Any) -> Any:
        y = getattr(self, f"_{self.odd.body.replace(' ', '_')}", self._linear)(x)
        for (_, use), value in zip(self.odd.pops, popped, strict=True):
            y = _used(use, y, value)
        if not self.odd.stashes:
            return y
        return y, *(_stashed(kind, x, y, popped) for _, kind in self.odd.stashes)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x))

    def _tanh(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def _frozen(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.linear(x)

    def _relu_(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x, inplace=True)

    def _add_(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    def _part_(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 1:].mul_(2)
        return x

    def _residual_(self, x: torch.Tensor) -> torch.Tensor:
        x += torch.tanh(self.linear(x.clone()))
        return x

    def _identity(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _view(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape)

    def _transposed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x.t().contiguous()).t()

    def _dropout(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), 0.3, self.training)

    def _dropout_(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.3, self.training, inplace=True)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))

    def _counter(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls.add_(1)
        return torch.sin(self.linear(x)) * (1 + 0.1 * self.calls)

    def _power(self, x: torch.Tensor) -> torch.Tensor:
        """As spectral normalisation: a buffer that each forward moves, and that the result depends on."""
        if self.training:
            with torch.no_grad():
                self.power = nn.functional.normalize(self.linear.weight @ self.power, dim=0)
        return self.linear(x) * (1 + self.power)

    def _detached(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.detach()) + 1

    def _single(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).to(torch.float32).to(x.dtype)

    def _hooked(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def _gradient_hook(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.requires_grad:
            # reentrant checkpoints call hooks on paths without a gradient
            y.register_hook(lambda gradient: None if gradient is None else gradient * 2)
        return y

    def _inner_checkpoint(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self._linear, x, use_reentrant=False)


def _used(use: str, y: torch.Tensor, value: Any) -> torch.Tensor:
    for tensor in value if isinstance(value, tuple) else (value,):
        if not tensor.is_floating_point():
            y = y * (1 + 0.1 * tensor)
        elif use == "add":
            y = y + tensor
        elif use == "multiply":
            y = y * (1 + 0.1 * tensor)
        elif use == "change_":
            y = y + tensor.add_(1)
        elif use == "scale_":
            tensor *= 0.5
            y = y + tensor
        elif use == "blind":
            y = y + tensor.detach()
        else:
            y = tensor
    return y


def _stashed(kind: str, x: torch.Tensor, y: torch.Tensor, popped: Sequence[Any]) -> Any:
    if kind == "popped":
        return next((v for v in popped if isinstance(v, torch.Tensor) and v.is_floating_point()), y)
    made: dict[str, Callable[[], Any]] = {
        "output": lambda: y,
        "input": lambda: x,
        "own": lambda: torch.cos(y),
        "view": lambda: y.view(y.shape),
        "detached": lambda: y.detach(),
        "integers": lambda: (y.detach() > 0).long(),
        "pair": lambda: (torch.cos(y), (y.detach() > 0).int()),
        "mask": lambda: y.detach() > 0,
        "part": lambda: y[:, :1],
    }
    return made[kind]()


def network_layers(network: Network, *, seed: int = 0) -> list[nn.Module]:
    """The modules, with the same weights for the same seed."""
    torch.manual_seed(seed)
    shared = nn.Linear(WIDTH, WIDTH)
    return [Layer(odd, shared).double() for odd in network.layers]


def network_batch(number: int, rows: int = ROWS) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    hidden, cond, labels = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3))
    return {"hidden": hidden, "cond": cond, "ids": torch.randint(0, 5, (rows, WIDTH), generator=generator)}, labels
