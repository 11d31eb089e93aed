"""Weights that do not lie row by row: what collectives and optimizers are given of them, and that they get it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_pulse.engine.memory_order import flattened, lay_as_weights, lay_in_rows, order_of
from deepspeed_pulse.engine.starting.sameness import plain

NUMBERS = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
WEIGHTS = {
    "rows": NUMBERS,
    "channels_last": NUMBERS.to(memory_format=torch.channels_last),
    "points": NUMBERS[:, :, :1, :1].clone().to(memory_format=torch.channels_last),
    "transposed": NUMBERS[0, 0].t(),
    "gaps": NUMBERS[:, :, :, ::2],
    "even gaps": NUMBERS[0, 0, :, 1],
    "no dimensions": NUMBERS[0, 0, 0, 1],
    "nothing": NUMBERS[:, :, :0].transpose(1, 3),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_one_row_for_a_while_and_takes_what_was_told(name: str) -> None:
    before = WEIGHTS[name].clone(memory_format=torch.preserve_format)
    weight = nn.Parameter(WEIGHTS[name].detach())
    strides = weight.stride()
    with flattened([weight, weight]):
        weight.data.view(torch.uint8)  # as upstream sends it
        assert weight.is_contiguous()
        weight.data.add_(1)
    assert weight.stride() == strides and torch.equal(weight.detach(), before + 1)
    WEIGHTS[name].sub_(1)


class Kernels(torch.optim.SGD):
    """Stands for an optimizer that DeepSpeed compiles."""


Kernels.__module__ = "deepspeed.ops.adam.fused_adam"


@pytest.mark.parametrize("kind", [Kernels, torch.optim.SGD])
def test_kernels_of_deepspeed_are_given_rows(kind: Any) -> None:
    weights = [nn.Parameter(WEIGHTS[name].clone()) for name in ("rows", "channels_last", "transposed")]
    optimizer = kind(weights, lr=0.1)
    orders = list(map(order_of, weights))
    assert lay_in_rows(optimizer) == (2 if kind is Kernels else 0)
    assert list(map(order_of, weights)) == ([None] * 3 if kind is Kernels else orders) and orders[1:] != [None, None]
    assert all(
        torch.equal(w, WEIGHTS[n]) for w, n in zip(weights, ("rows", "channels_last", "transposed"), strict=True)
    )


def test_loaded_state_lies_as_the_weight_does() -> None:
    weight = nn.Parameter(WEIGHTS["channels_last"].clone())
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    before = {key: value.clone() for key, value in state.items()}
    state.update({key: value.contiguous() for key, value in state.items()})
    lay_as_weights(optimizer)
    assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == weight.stride()
    assert all(torch.equal(value, before[key]) for key, value in state.items())


def test_ranks_compare_the_order_too() -> None:
    assert plain(WEIGHTS["rows"]) != plain(WEIGHTS["channels_last"])
    assert plain(WEIGHTS["rows"]) == plain(WEIGHTS["rows"].clone())
