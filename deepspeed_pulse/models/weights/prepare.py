"""A user's change to a model whose weights are not there yet: freezing, adapters, switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models.weights.skeleton import Skeleton

Prepare = Callable[[Any], Any]
"""Is given the model and changes it in place."""

_ADVICE = (
    "prepare= may freeze parameters, add modules and set options; for more build the model whole and use to_layers()"
)


def run_prepare(skeleton: Skeleton, prepare: Prepare) -> None:
    """Let ``prepare`` change the model of a skeleton.

    While it runs, parameters without values look as if they were on the CPU, because adapters go where
    the weights beside them are. Each is one NaN that fills the whole shape, so that a value computed from
    it shows. Random numbers are the same on every rank.

    Raises:
        ConfigError: weights were replaced, changed, or used to compute something.
    """
    real = {}
    for module, name, parameter in _parameters(skeleton.model):
        if skeleton.key_of(parameter) is not None:
            module._parameters[name] = stand_in = _stand_in(parameter)
            real[id(stand_in)] = (stand_in, parameter)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        prepare(skeleton.model)
    for module, name, parameter in _parameters(skeleton.model):
        if id(parameter) in real:
            stand_in, parameter = real.pop(id(parameter))
            _check_unchanged(name, stand_in)
            module._parameters[name] = parameter
            parameter.requires_grad_(stand_in.requires_grad)
    for key, tensor in skeleton.model.state_dict(keep_vars=True).items():
        if skeleton.key_of(tensor) is None and (tensor.is_meta or bool(tensor.isnan().any())):
            raise ConfigError(
                f"prepare: {key} is computed from weights that are not there yet, or replaces some; {_ADVICE}"
            )
    if real:
        raise ConfigError(f"prepare: {len(real)} parameters are no longer part of the model; {_ADVICE}")


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module, name, parameter


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    one = torch.full((), float("nan") if parameter.is_floating_point() else 0, dtype=parameter.dtype)
    return nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)


def _check_unchanged(name: str, stand_in: nn.Parameter) -> None:
    if stand_in.is_floating_point() and not bool(stand_in.flatten()[:1].isnan().all()):
        raise ConfigError(f"prepare: the values of a parameter {name!r} were changed, but are not there yet; {_ADVICE}")
