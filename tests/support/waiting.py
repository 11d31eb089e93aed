"""The toy network, every layer of which waits for the whole device, forwards and backwards: always, or at first."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from support.toy import toy_layers


class Waits(torch.autograd.Function):
    """Hands a tensor on, and its gradient, once the device has done all that it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        get_accelerator().synchronize()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        get_accelerator().synchronize()
        return gradients[0]


class Loads(Waits):
    """Does so with the first tensor of a shape in each direction, as where a kernel is loaded when it is first used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loaded: set[Any]) -> torch.Tensor:
        ctx.loaded = loaded
        _load(loaded, "forward", x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _load(ctx.loaded, "backward", gradients[0])
        return gradients[0], None


def _load(loaded: set[Any], what: str, x: torch.Tensor) -> None:
    if (what, x.shape) not in loaded:
        get_accelerator().synchronize()
        loaded.add((what, x.shape))


def waiting_layers(*, at_first: bool = False) -> list[Any]:
    found = toy_layers()
    for spec in found:
        build = spec.build

        def waiting(build: Any = build, **options: Any) -> Any:
            layer, loaded = build(**options), set[Any]()

            def hands_on(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
                first = Loads.apply(inputs[0], loaded) if at_first else Waits.apply(inputs[0])
                return (first, *inputs[1:])

            layer.register_forward_pre_hook(hands_on)
            return layer

        spec.build = waiting
    return found
