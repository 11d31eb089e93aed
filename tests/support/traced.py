"""A traced layer list against its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support.families import interpret
from support.zoo import output_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def assert_equal(model: nn.Module, layers: Sequence[Any], *batches: dict[str, Any]) -> None:
    """Output, every gradient and that of the first entry, bit for bit, with the same random numbers."""
    for batch in batches:
        found, expected = (gradients_of(model, run, batch) for run in (output_of, lambda _, b: interpret(layers, b)))
        for name, wanted in expected.items():
            got = found[name]
            assert (got is None) == (wanted is None), name
            assert got is None or (got.dtype == wanted.dtype and torch.equal(got, wanted)), name


def assert_close(model: nn.Module, layers: Sequence[Any], batch: dict[str, Any]) -> None:
    """The same up to rounding."""
    found, expected = (gradients_of(model, run, batch) for run in (output_of, lambda _, b: interpret(layers, b)))
    for name, wanted in expected.items():
        got = found[name]
        assert (got is None) == (wanted is None), name
        if got is not None and wanted is not None:
            off = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
            assert off <= 1e-5, f"{name}: {off:.1e}"


def gradients_of(model: nn.Module, run: Any, batch: dict[str, Any]) -> dict[str, Tensor | None]:
    first = next(iter(batch))
    leaf = batch[first]
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        leaf = leaf.clone().requires_grad_()
    torch.manual_seed(5)
    outputs = [one for one in tree_leaves(run(model, {**batch, first: leaf})) if one is not None]
    weights = (torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view(one.shape) for one in outputs)
    sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True)).backward()
    found: dict[str, Tensor | None] = {f"output {i}": one.detach() for i, one in enumerate(outputs)}
    found["first entry"] = leaf.grad if isinstance(leaf, Tensor) else None
    for name, parameter in model.named_parameters():
        found[name], parameter.grad = parameter.grad, None
    return found
