"""Placeholders: parameters that stand where a rank, or one of its parameter groups, has nothing to train.

Optimizers refuse an empty list, and upstream drops empty groups. Its optimizers for mixed precision and
ZeRO-1 sum norms over the pipeline once a group, so every rank must have as many.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.data.agreement import raise_everywhere, told_by_all
from deepspeed_pulse.errors import ConfigError

PLACEHOLDER = "pulse_placeholder"


def is_placeholder(name: str) -> bool:
    """True for the name of a placeholder, which is nobody's parameter."""
    return name.startswith(PLACEHOLDER)


def add_placeholder(module: torch.nn.Module) -> tuple[str, torch.nn.Parameter]:
    """Give a module one more, of the device and dtype of its parameters; returns its name too."""
    name = f"{PLACEHOLDER}{sum(is_placeholder(key) for key, _ in module.named_parameters()) or ''}"
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(1))
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
    module.register_parameter(name, parameter)
    return name, parameter


def without_empty_groups(
    client_optimizer: Any, model_parameters: Iterable[Any], module: torch.nn.Module, names: MutableMapping[Any, str]
) -> tuple[Any, list[Any]]:
    """What a user gives to train with (an optimizer, a factory or None, and parameters), no parameter group empty.

    Args:
        names: of the module's parameters; those of new placeholders are added.
    """

    def filled(groups: Iterable[Any]) -> list[Any]:
        found = list(groups)
        for group in found:
            if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor):
                group["params"] = list(group["params"])
                if not group["params"]:
                    name, parameter = add_placeholder(module)
                    names[parameter] = name
                    group["params"].append(parameter)
        return found

    def made(parameters: Any) -> Any:
        optimizer = client_optimizer(parameters)
        filled(optimizer.param_groups)
        return optimizer

    if hasattr(client_optimizer, "param_groups"):
        filled(client_optimizer.param_groups)
        return client_optimizer, list(model_parameters)
    return None if client_optimizer is None else made, filled(model_parameters)


def check_same_groups(optimizer: Any, pipeline: Any, size: int) -> None:
    """Every rank of a pipeline must have as many parameter groups. Collective in the world.

    Args:
        pipeline: its process group.
        size: ranks of the pipeline.
    """
    counts = told_by_all(len(optimizer.param_groups), size, pipeline)
    problem = None
    if len(set(counts)) > 1:
        problem = ConfigError(
            f"optimizer: expected as many parameter groups on every pipeline rank, found {', '.join(map(str, counts))}"
            "; build the same groups on every rank, empty where a rank has no such parameter"
        )
    raise_everywhere(problem, "the optimizer cannot be built", dist.get_world_size())
