"""Networks with any skip graph: drawn as data, made into layer lists.

Values have one or many consumers, lie inside one another, cross, mirror themselves or span the whole network. They are
tensors of their own, the very tensor that goes on as hidden state, a popped value under a second name, floats and
integers without gradient, or pairs of these; some consumers read a value without differentiating it, some layers are
frozen, some read the batch.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.reference import Unpartitioned
from torch import nn
from torch.nn.functional import mse_loss

from deepspeed_pulse.engine.specs import describe
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.runtime.payload import num_bytes, tensors_in

WIDTH = 4


class Kind(enum.Enum):
    OWN = "a tensor of its own"
    HIDDEN = "the tensor that goes on as hidden state"
    AGAIN = "the first popped tensor under another name"
    CONSTANT = "floats without gradient"
    INTEGERS = "integers"
    PAIR = "a tensor and integers"


@dataclass(frozen=True, kw_only=True)
class Value:
    """``blind``: consumers that do not differentiate it."""

    source: int
    targets: tuple[int, ...]
    kind: Kind
    blind: frozenset[int]

    @property
    def num_bytes(self) -> int:
        """Of one microbatch in float32."""
        elements, sizes = 2 * WIDTH, {Kind.INTEGERS: 8, Kind.PAIR: 4 + 8}
        return elements * sizes.get(self.kind, 4)


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """``frozen``: layers without trained parameters; ``readers``: layers that pop the batch entry ``ids``."""

    num_layers: int
    values: tuple[Value, ...]
    frozen: frozenset[int]
    readers: frozenset[int]


def draw_sketch(rng: random.Random, num_layers: int) -> Sketch:
    """Any sketch; the last layer trains, so that there is a loss to differentiate."""
    values = tuple(_draw_value(rng, num_layers) for _ in range(rng.randint(0, 9) if num_layers > 1 else 0))
    frozen = range(rng.randrange(num_layers)) if rng.random() < 0.3 else ()
    alone = [i for i in range(num_layers - 1) if rng.random() < 0.1]
    readers = frozenset(i for i in range(num_layers) if rng.random() < 0.15)
    return Sketch(num_layers=num_layers, values=values, frozen=frozenset([*frozen, *alone]), readers=readers)


def numbered_sketch(number: int) -> Sketch:
    """One of 20 layers."""
    return draw_sketch(random.Random(number), 20)


def _draw_value(rng: random.Random, num_layers: int) -> Value:
    last = num_layers - 1
    source = rng.randrange(last)
    shape = rng.choice(("one", "several", "all", "mirror", "far", "next"))
    if shape == "far":
        source, targets = rng.randrange(min(3, last)), [last]
    elif shape == "mirror" and source < last - source:
        targets = [last - source]
    elif shape == "several":
        targets = rng.sample(range(source + 1, num_layers), rng.randint(1, min(5, last - source)))
    elif shape == "all":
        targets = list(range(source + 1, num_layers))
    elif shape == "next":
        targets = [source + 1]
    else:
        targets = [rng.randint(source + 1, last)]
    blind = frozenset(target for target in targets if rng.random() < 0.15)
    return Value(source=source, targets=tuple(sorted(targets)), kind=rng.choice(list(Kind)), blind=blind)


class Knot(nn.Module):
    """Mixes what it pops into the hidden state and stashes what it is told to."""

    def __init__(self, stashes: Sequence[Kind], blind: Sequence[bool], trains: bool) -> None:
        super().__init__()
        self.inner, self.mix = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(len(blind) + 1, WIDTH))
        self.stashes, self.blind = tuple(stashes), tuple(blind)
        self.requires_grad_(trains)

    def forward(self, x: torch.Tensor, *popped: Any) -> Any:
        y = x
        for weight, value, blind in zip(self.mix, popped, self.blind, strict=False):
            for tensor in value if isinstance(value, tuple) else (value,):
                seen = tensor.detach() if blind else tensor
                y = y + weight * seen if seen.is_floating_point() else y * (1 + 0.1 * seen)
        h = x + torch.tanh(self.inner(y))
        if not self.stashes:
            return h
        return h, *(self._stash(kind, h, popped) for kind in self.stashes)

    def _stash(self, kind: Kind, h: torch.Tensor, popped: Sequence[Any]) -> Any:
        own, signs = torch.sin(h * self.mix[-1]), (h.detach() > 0).long()
        if kind is Kind.AGAIN:
            return next((v for v in popped if isinstance(v, torch.Tensor) and v.is_floating_point()), own)
        made = {Kind.HIDDEN: h, Kind.CONSTANT: own.detach(), Kind.INTEGERS: signs, Kind.PAIR: (own, signs)}
        return made.get(kind, own)


def sketch_layers(sketch: Sketch) -> list[Any]:
    """The layer list; values are called ``v0``, ``v1``, ..."""
    from deepspeed_pulse import LayerSpec

    named = [(f"v{index}", value) for index, value in enumerate(sketch.values)]
    layers = []
    for i in range(sketch.num_layers):
        pops = [(name, i in value.blind) for name, value in named if i in value.targets]
        if i in sketch.readers:
            pops.append(("ids", False))
        stashes = [(name, value.kind) for name, value in named if value.source == i]
        arguments = ([kind for _, kind in stashes], [blind for _, blind in pops], i not in sketch.frozen)
        names = {"stash": [name for name, _ in stashes], "pop": [name for name, _ in pops]}
        layers.append(LayerSpec(Knot, *arguments, **{key: tuple(found) for key, found in names.items()}))
    return layers


def sketch_batch(step: int, microbatch: int, data_index: int, *, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    hidden, labels = (torch.randn(2, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    return {"hidden": hidden, "ids": torch.randint(0, 5, (2, WIDTH), generator=generator)}, labels


def graph_of(sketch: Sketch) -> Graph:
    return Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(sketch_layers(sketch))))


@dataclass(frozen=True)
class Reference:
    """Of the unpartitioned model: every gradient; bytes forward and backward behind each layer and of each value."""

    gradients: dict[str, torch.Tensor]
    hidden: list[tuple[int, int]]
    values: dict[str, tuple[int, int]]


def reference(sketch: Sketch, microbatches: int) -> Reference:
    model, graph = Unpartitioned(sketch_layers(sketch)).double(), graph_of(sketch)
    hidden: list[tuple[int, int]] = []
    values: dict[str, tuple[int, int]] = {}

    def watched(layer: Layer, function: Any) -> Any:
        def run(*args: Any) -> Any:
            result = function(*args)
            first, *stashed = result if layer.stash else (result,)
            hidden.append(sizes(first))
            values.update(zip(layer.stash, map(sizes, stashed), strict=True))
            return result

        return run

    model.functions = [watched(*pair) for pair in zip(graph.layers, model.functions, strict=True)]
    for inputs, labels in data(microbatches):
        (mse_loss(model(inputs), labels) / microbatches).backward()
    gradients = {name: gradient(p) for name, p in model.named_parameters()}
    return Reference(gradients, hidden[: sketch.num_layers], values)


def sizes(value: Any) -> tuple[int, int]:
    tensors = tensors_in(value)
    return num_bytes(tensors), num_bytes([t for t in tensors if t.requires_grad])


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def data(microbatches: int) -> list[Any]:
    return [sketch_batch(0, m, 0, dtype=torch.float64) for m in range(microbatches)]
