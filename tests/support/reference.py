"""The unpartitioned model: the plain meaning of a layer list, in one process, without the package's runtime."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch

from deepspeed_pulse.engine.specs import describe, unwrap

BASE_SEED = 1234


class Unpartitioned(torch.nn.Module):
    """All layers of a list, built as ``seed_layers=True`` builds them."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.declared = [describe(i, layer) for i, layer in enumerate(layers)]
        self.functions: list[Callable[..., Any]] = []
        self.by_layer: dict[int, torch.nn.Module] = {}
        tied: dict[str, torch.nn.Module] = {}
        for index, layer in enumerate(map(unwrap, layers)):
            if not hasattr(layer, "build"):
                module, function = layer, layer
            else:
                for seed in (random.seed, numpy.random.seed, torch.manual_seed):
                    seed(BASE_SEED + index)
                key = getattr(layer, "key", None)
                module = tied.setdefault(key, layer.build()) if key in tied or key is not None else layer.build()
                forward_fn = getattr(layer, "forward_fn", None)
                function = partial(forward_fn, module) if forward_fn else module
            self.functions.append(function)
            if isinstance(module, torch.nn.Module):
                self.by_layer[index] = module
                self.add_module(str(index), module)

    def forward(self, inputs: Any, first: str = "hidden", number: int | None = None) -> Any:
        """``number``: of the microbatch, where layers draw random numbers."""
        if isinstance(inputs, dict):
            values = dotted(inputs)
            hidden = values[first]
        else:
            values, hidden = {}, inputs
        for index, (declared, function) in enumerate(zip(self.declared, self.functions, strict=True)):
            if number is not None:
                torch.manual_seed((BASE_SEED * (number + 2) + index) % 2**32)
            result = function(hidden, *[values[name] for name in declared.pop])
            if declared.stash:
                hidden, *stashed = result
                values.update(zip(declared.stash, stashed, strict=True))
            else:
                hidden = result
        return hidden


def dotted(inputs: Any) -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        inner = dotted(value) if isinstance(value, dict) else None
        found.update({name: value} if inner is None else {f"{name}.{key}": more for key, more in inner.items()})
    return found


def train(
    model: Unpartitioned,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Any],
    loss_fn: Callable[..., torch.Tensor],
    clip: float,
    first: str = "hidden",
    numbers: Sequence[int | None] | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """One step over all microbatches; the mean loss and every gradient as the optimizer saw it."""
    optimizer.zero_grad()
    total = 0.0
    for (inputs, labels), number in zip(microbatches, numbers or [None] * len(microbatches), strict=True):
        loss = loss_fn(model(inputs, first, number), labels) / len(microbatches)
        loss.backward()
        total += float(loss.detach())
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    optimizer.step()
    return total, gradients


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """norm(a - b) / norm(b), on whatever devices they lie."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    scale = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / (scale if scale > 0 else 1.0)
