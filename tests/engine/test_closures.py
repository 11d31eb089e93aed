"""Which weights a function reaches: each of these holds or reads ``EMBED``'s, or does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from deepspeed_pulse.engine.sharing.closures import tensors_reached, weights_reached

EMBED = nn.Linear(4, 4, bias=False)
KEPT = [EMBED]


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale, self.sizes = EMBED, 2.0, {"a": 3}

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)

    def indirect(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def reshaped(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) * self.scale * self.sizes["a"]


class Plain:
    """No module."""

    def __init__(self, embed: Any) -> None:
        self.embed, self.scale = embed, 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def global_head(x: torch.Tensor) -> torch.Tensor:
    return x @ EMBED.weight.t()


def helped(x: torch.Tensor) -> torch.Tensor:
    return global_head(x)


def through_a_list(x: torch.Tensor) -> torch.Tensor:
    return KEPT[0](x)


def with_default(x: torch.Tensor, embed: Any = EMBED) -> torch.Tensor:
    return embed(x)


def inside(x: torch.Tensor) -> torch.Tensor:
    return max([x], key=lambda y: EMBED(y).sum())


def closing(embed: Any) -> Callable[..., Any]:
    return lambda x: embed(x).to(x.dtype)


def closing_over_weight(weight: Any) -> Callable[..., Any]:
    def tied(x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    return tied


def scaling(owner: Any) -> Callable[..., Any]:
    return lambda x: x * owner.scale


class Program(PipelineModule):
    """A pipeline module whose functions read its settings, and what it keeps of its layers; as in GPT-NeoX."""

    def __init__(self, *, made: bool) -> None:
        self.scale = 2.0
        if made:
            nn.Module.__init__(self)
            self.scale, self.forward_funcs = 2.0, [EMBED]
            self.tied_modules, self.extra = nn.ModuleDict({"embed": EMBED}), EMBED

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output - labels).mean() * self.scale


def settings_of(program: Any) -> Callable[..., Any]:
    return lambda embed, x: x @ embed.weight * program.scale * program.tied_modules.embed.weight.infshape


def handing(program: Any) -> Callable[..., Any]:
    return lambda embed, x: max(program, x)


def beside_the_layers(program: Any) -> Callable[..., Any]:
    return lambda x: program.extra(x)


OWNER = Owner()

READS: dict[str, Any] = {
    "closure": closing(EMBED),
    "closure over the parameter": closing_over_weight(EMBED.weight),
    "partial": functools.partial(lambda embed, x: embed(x), EMBED),
    "partial with a keyword": functools.partial(nn.functional.linear, weight=EMBED.weight),
    "bound method": OWNER.head,
    "bound method, indirectly": OWNER.indirect,
    "bound forward": EMBED.forward,
    "callable object": Plain(EMBED),
    "global": global_head,
    "global of a helper": helped,
    "global list": through_a_list,
    "default": with_default,
    "lambda inside": inside,
    "a pipeline module's, beside its layers": beside_the_layers(Program(made=True)),
}

READS_NOT: dict[str, Any] = {
    "function of torch": torch.tanh,
    "python function of torch": nn.functional.gelu,
    "bound method that needs no weight": OWNER.reshaped,
    "closure that needs no weight": scaling(OWNER),
    "method of an object": Plain(EMBED).scaled,
    "frozen": closing(nn.Linear(2, 2).requires_grad_(False)),
    "partial of numbers": functools.partial(torch.flatten, start_dim=1),
    "lambda": lambda x: x * 2,
    "class": torch.Tensor,
    "settings of a pipeline module": settings_of(Program(made=True)),
    "settings of one that is being made": settings_of(Program(made=False)),
    "a pipeline module that is handed on": handing(Program(made=True)),
    "its loss": Program(made=True).loss,
    "the loss of one that is being made": Program(made=False).loss,
}


@pytest.mark.parametrize("name", READS)
def test_a_weight_that_is_read_is_found(name: str) -> None:
    found = weights_reached(READS[name])
    assert len(found) == 1 and found[0] is EMBED.weight


@pytest.mark.parametrize("name", READS_NOT)
def test_others_are_not(name: str) -> None:
    assert weights_reached(READS_NOT[name]) == []


def test_what_does_not_train_is_reached_too() -> None:
    norm = nn.BatchNorm1d(4).requires_grad_(False)
    assert weights_reached(closing(norm)) == []
    assert set(tensors_reached(global_head, closing(norm))) == {EMBED.weight, *norm.parameters(), *norm.buffers()}
