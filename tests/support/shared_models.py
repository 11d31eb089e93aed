"""Layer lists in which one weight has several places."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Pushing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, torch.sin(y)


class Popping(Block):
    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * skip)


class Transposed(nn.Module):
    """Reads a weight the other way round."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Idle(nn.Module):
    """Holds a module that it does not call."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Wrapping(Transposed):
    """Has a child of the name by which a tied call holds its module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight)
        self.module = nn.Tanh()


class Table(nn.Module):
    """Adds a table of numbers, a buffer without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("numbers", torch.randn(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.scale(x + (self.numbers * self.mask).to(x.dtype)))


def blocks() -> list[Any]:
    return [Block() for _ in range(8)]


def listed_twice() -> list[Any]:
    layers = blocks()
    layers[6] = layers[1]
    return layers


def first_and_last() -> list[Any]:
    """An embedding's weight in the head."""
    layers = blocks()
    layers[0] = nn.Linear(WIDTH, WIDTH, bias=False)
    layers[7] = Transposed(layers[0].weight)
    return layers


def assigned() -> list[Any]:
    """``b.weight = a.weight``, at two pairs of layers, one of them crossing the other."""
    layers = blocks()
    layers[5].inner.weight = layers[1].outer.weight
    layers[6].outer.bias = layers[3].inner.bias
    return layers


def submodule() -> list[Any]:
    layers = blocks()
    layers[7].inner = layers[2].inner
    return layers


def three_places() -> list[Any]:
    """Two of them in one layer, under two names."""
    layers = blocks()
    layers[3].inner.weight = layers[4].inner.weight = layers[4].outer.weight = layers[0].inner.weight
    return layers


def everywhere() -> list[Any]:
    """One block, eight times."""
    return [Block()] * 8


def unused() -> list[Any]:
    layers = blocks()
    layers[7] = Idle(layers[0])
    return layers


def frozen() -> list[Any]:
    """Shared and frozen in part; and the last layers hold nothing that trains but what they share."""
    layers = blocks()
    layers[6] = layers[0]
    layers[0].inner.requires_grad_(False)
    layers[7].requires_grad_(False)
    return layers


def with_tied_spec() -> list[Any]:
    from deepspeed_pulse import LayerSpec, TiedLayerSpec

    layers = listed_twice()
    layers[0] = TiedLayerSpec("block", Block, tied_weight_attr="inner.weight")
    layers[4] = LayerSpec(Block)
    layers[7] = TiedLayerSpec("block", Block, tied_weight_attr="inner.weight")
    return layers


def with_names() -> list[Any]:
    """A named value between the two places of a weight; the module that has both stashes and pops."""
    from deepspeed_pulse import spec

    layers = blocks()
    pushing, popping = Pushing(), Popping()
    popping.inner = pushing.inner
    layers[0], layers[7] = spec(pushing, stash="skip", name="push"), spec(popping, pop="skip", name="pop")
    layers[5] = layers[2]
    return layers


def tables() -> list[Any]:
    """A module with buffers, listed twice."""
    layers = blocks()
    layers[1] = layers[5] = Table()
    return layers


def tables_apart() -> list[Any]:
    """Three modules with one buffer, which has several copies on a device."""
    layers = blocks()
    layers[1], layers[5], layers[6] = Table(), Table(), Table()
    layers[6].numbers = layers[5].numbers = layers[1].numbers
    return layers


def same_tables_apart() -> list[Any]:
    """With the same weights every time."""
    torch.manual_seed(0)
    return tables_apart()


MODELS: dict[str, Callable[[], list[Any]]] = {
    "listed twice": listed_twice,
    "first and last": first_and_last,
    "assigned": assigned,
    "submodule": submodule,
    "three places": three_places,
    "everywhere": everywhere,
    "unused": unused,
    "frozen": frozen,
    "with a tied spec": with_tied_spec,
    "with names": with_names,
    "tables": tables,
    "tables apart": tables_apart,
}


def batch(step: int, microbatch: int, data_index: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_index)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, WIDTH, generator=generator)


# -- what cannot be one weight ---------------------------------------------------------------


class Around(nn.Module):
    """A block that borrows a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


@functools.cache
def kept_module(_: int) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Keeping(Around):
    """Takes its module from a cache that the first one fills."""

    def __init__(self) -> None:
        super().__init__(kept_module(os.getpid()))


class Counting(Block):
    """Writes to a buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x) + self.count / 10


class Replacing(Counting):
    """Puts another tensor in the buffer's place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return Block.forward(self, x) + self.count / 10


def specs_of_one_module() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    layers, inner = blocks(), nn.Linear(WIDTH, WIDTH)
    layers[1], layers[6] = LayerSpec(Around, inner), LayerSpec(Around, inner)
    return layers


def spec_of_a_listed_module() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    layers = blocks()
    layers[7] = LayerSpec(Around, layers[0])
    return layers


def spec_of_a_parameter() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    layers = blocks()
    layers[7] = LayerSpec(Transposed, layers[0].inner.weight)
    return layers


def spec_of_a_parameter_beside_a_module() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    layers = blocks()
    layers[7] = LayerSpec(Wrapping, layers[0].inner.weight)
    return layers


def specs_with_a_cache() -> list[Any]:
    from deepspeed_pulse import LayerSpec

    layers = blocks()
    layers[1], layers[4] = LayerSpec(Keeping), LayerSpec(Keeping)
    return layers


def tied_spec_of_a_listed_module() -> list[Any]:
    from deepspeed_pulse import TiedLayerSpec

    layers = blocks()
    layers[2] = TiedLayerSpec("around", Around, layers[4])
    layers[7] = TiedLayerSpec("around", Around, layers[4])
    return layers


def two_keys_of_one_module() -> list[Any]:
    from deepspeed_pulse import TiedLayerSpec

    layers, inner = blocks(), Block()
    layers[2], layers[7] = TiedLayerSpec("a", Around, inner), TiedLayerSpec("b", Around, inner)
    return layers


def function_of_a_listed_module() -> list[Any]:
    layers = blocks()
    inner = layers[0].inner
    layers[7] = lambda x: x @ inner.weight
    return layers


def partial_of_a_hidden_module() -> list[Any]:
    layers = blocks()
    layers[3] = functools.partial(lambda module, x: module(x), Block())
    return layers


def forward_fn_of_a_listed_module() -> list[Any]:
    from deepspeed_pulse import TiedLayerSpec

    layers = blocks()
    inner = layers[0].inner
    layers[7] = TiedLayerSpec("block", Block, forward_fn=lambda module, x: module(x) @ inner.weight)
    return layers


def shared_statistics() -> list[Any]:
    layers = blocks()
    layers[2] = layers[5] = nn.BatchNorm1d(WIDTH)
    return layers


def shared_counter() -> list[Any]:
    layers = blocks()
    layers[2] = layers[5] = Counting()
    return layers


def replaced_buffer() -> list[Any]:
    layers = blocks()
    layers[2] = layers[5] = Replacing()
    return layers


def same_memory() -> list[Any]:
    layers = blocks()
    layers[5].inner.weight = nn.Parameter(layers[1].inner.weight.data)
    return layers


class Normalising(Block):
    """Writes its normalised weight into itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.div_(self.inner.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


def one_normalises() -> list[Any]:
    layers = blocks()
    layers[1] = Normalising()
    layers[6].inner.weight = layers[1].inner.weight
    return layers


REFUSED_APART: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "a weight that one layer normalises": (
        one_normalises,
        "layers 1.Normalising and 6.Block share a weight, which 1.Normalising changes in forward (inner.weight)",
    ),
}
"""The same, where the layers lie on several ranks."""

REFUSED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "two specs of one module": (specs_of_one_module, "layers 1.Around and 6.Around are built with one parameter"),
    "a spec of a listed module": (spec_of_a_listed_module, "layers 0.Block and 7.Around are built with one parameter"),
    "a spec of a parameter": (spec_of_a_parameter, "layers 0.Block and 7.Transposed are built with one parameter"),
    "a spec of a parameter beside a module": (
        spec_of_a_parameter_beside_a_module,
        "layers 0.Block and 7.Wrapping are built with one parameter",
    ),
    "specs with a cache": (specs_with_a_cache, "layers 1.Keeping and 4.Keeping are built with one parameter"),
    "a tied spec of a listed module": (
        tied_spec_of_a_listed_module,
        "layers 2.Around and 4.Block are built with one parameter",
    ),
    "two keys of one module": (two_keys_of_one_module, "layers 2.Around and 7.Around are built with one parameter"),
    "a function of a listed module": (
        function_of_a_listed_module,
        "reads trainable weights, the first is inner.weight of layer 0.Block",
    ),
    "a partial of a hidden module": (
        partial_of_a_hidden_module,
        "layer 3.partial is a function that reads trainable weights, the first is a parameter of shape [8, 8]",
    ),
    "a forward_fn of a listed module": (
        forward_fn_of_a_listed_module,
        "layer 7.Block is a function that reads trainable weights, the first is inner.weight of layer 0.Block",
    ),
    "running statistics": (shared_statistics, "layers 2.BatchNorm1d and 5.BatchNorm1d share a module that keeps"),
    "a counter": (shared_counter, "buffer 2.count belongs to several layers and changed"),
    "a replaced buffer": (replaced_buffer, "buffer 2.count belongs to several layers and changed"),
    "two parameters in one memory": (same_memory, "parameters 1.inner.weight and 5.inner.weight are two"),
}
"""Layer lists and a part of the error; the same on every rank under every plan."""
