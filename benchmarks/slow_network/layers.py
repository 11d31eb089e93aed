"""Layers that sleep for a model's times and hold its bytes: what every side of the benchmark trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Times in ms and sizes in bytes, of a microbatch of one.

    ``stashes``: name and bytes of the values it makes for later layers; one as large as ``output_bytes`` is its output
    itself. ``pops``: names of those it reads.
    """

    name: str
    forward_ms: float
    input_ms: float
    weight_ms: float
    param_bytes: int
    activation_bytes: int
    output_bytes: int
    stashes: tuple[tuple[str, int], ...] = ()
    pops: tuple[str, ...] = ()

    @property
    def work_ms(self) -> float:
        return self.forward_ms + self.input_ms + self.weight_ms


slept_ms = 0.0
"""By this process, as asked for: what a side repeats shows here."""


def sleep(ms: float) -> None:
    global slept_ms
    slept_ms += ms
    time.sleep(ms / 1e3)


class Through(torch.autograd.Function):
    """From what a layer reads to what it makes; sleeps forward, and backward for the input's gradient."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, x: torch.Tensor, *popped: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layer, ctx.shapes = layer, [value.shape for value in (x, *popped)]
        samples = len(x)
        ctx.save_for_backward(x.new_empty(samples, layer.activation_bytes // FLOAT_BYTES))
        sleep(layer.forward_ms * samples)
        sizes = [layer.output_bytes, *(size for _, size in layer.stashes if size != layer.output_bytes)]
        return tuple(x.new_zeros(samples, size // FLOAT_BYTES) for size in sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        sleep(ctx.layer.input_ms * len(gradients[0]))
        return (None, *(gradients[0].new_zeros(shape) for shape in ctx.shapes))


class Weight(torch.autograd.Function):
    """A parameter's way into the output: backward sleeps for its gradient, apart from the input's."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, weight: torch.Tensor, samples: int) -> torch.Tensor:
        ctx.layer, ctx.shape, ctx.samples = layer, weight.shape, samples
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        sleep(ctx.layer.weight_ms * ctx.samples)
        return None, gradient.new_zeros(ctx.shape), None


class Sleeper(torch.nn.Module):
    """``forward(hidden, *popped)`` gives the hidden state, and after it what the layer stashes."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.weight = torch.nn.Parameter(torch.zeros(max(1, layer.param_bytes // FLOAT_BYTES)))

    def forward(self, x: torch.Tensor, *popped: torch.Tensor) -> Any:
        layer = self.layer
        hidden, *others = Through.apply(layer, x, *popped)
        weight = Weight.apply(layer, self.weight, len(x))
        hidden = hidden + weight
        if not layer.stashes:
            return hidden
        made = iter(other + weight for other in others)
        return (hidden, *(hidden if size == layer.output_bytes else next(made) for _, size in layer.stashes))


class Relaying(torch.nn.Module):
    """A sleeper among layers that hand on a tuple: the hidden state and every value that a later layer reads.

    Args:
        alive: names of the values that come in, in order.
        leaving: those that no later layer reads.
    """

    def __init__(self, layer: Layer, alive: tuple[str, ...], leaving: frozenset[str]) -> None:
        super().__init__()
        self.sleeper, self.alive, self.leaving = Sleeper(layer), alive, leaving

    def forward(self, inputs: Any) -> Any:
        x, *values = inputs if isinstance(inputs, tuple) else (inputs,)
        have = dict(zip(self.alive, values, strict=True))
        made = self.sleeper(x, *(have[name] for name in self.sleeper.layer.pops))
        hidden, *stashed = made if isinstance(made, tuple) else (made,)
        have |= zip((name for name, _ in self.sleeper.layer.stashes), stashed, strict=True)
        kept = [value for name, value in have.items() if name not in self.leaving]
        return (hidden, *kept) if kept else hidden


def relaying(layers: tuple[Layer, ...]) -> list[tuple[Any, ...]]:
    """Class and arguments of each layer of a list that hands on tuples."""
    last_reader = {name: index for index, layer in enumerate(layers) for name in layer.pops}
    alive: tuple[str, ...] = ()
    made = []
    for index, layer in enumerate(layers):
        here = (*alive, *(name for name, _ in layer.stashes))
        leaving = frozenset(name for name in here if last_reader[name] == index)
        made.append((Relaying, layer, alive, leaving))
        alive = tuple(name for name in here if name not in leaving)
    return made
