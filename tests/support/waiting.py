"""The toy network, every layer of which waits for the whole device, forwards and backwards."""

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


def _waits(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (Waits.apply(inputs[0]), *inputs[1:])


def waiting_layers() -> list[Any]:
    found = toy_layers()
    for spec in found:
        build = spec.build

        def waiting(build: Any = build, **options: Any) -> Any:
            layer = build(**options)
            layer.register_forward_pre_hook(_waits)
            return layer

        spec.build = waiting
    return found
