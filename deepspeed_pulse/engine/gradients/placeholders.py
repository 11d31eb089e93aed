"""Placeholders: parameters that stand where a rank, or one of its parameter groups, has nothing to train.

Optimizers refuse an empty list, and upstream drops empty groups. Its optimizers for mixed precision and
ZeRO-1 sum norms over the pipeline once a group, so every rank must have as many.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch

from deepspeed_pulse.engine.collectives import told_by_all

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


def sums_norms_by_group(engine: Any) -> bool:
    """True where upstream's optimizer will reduce norms over the pipeline once a parameter group: ZeRO-1, fp16."""
    return bool(engine.zero_optimization_stage() or engine.fp16_enabled())


def with_groups(
    client_optimizer: Any, model_parameters: Iterable[Any], engine: Any, names: MutableMapping[Any, str]
) -> tuple[Any, list[Any]]:
    """What a user gives to train with (an optimizer, a factory or None, and parameters), no parameter group empty.

    Where upstream's optimizer needs it, ranks that have fewer groups than others of their pipeline get more, of one
    placeholder each. Collective in the pipeline then.

    Args:
        names: of the module's parameters; those of new placeholders are added.
    """

    def placeholder() -> torch.nn.Parameter:
        name, parameter = add_placeholder(engine.module)
        names[parameter] = name
        return parameter

    def filled(groups: Iterable[Any]) -> list[Any]:
        found = list(groups)
        for group in found:
            if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor):
                group["params"] = list(group["params"]) or [placeholder()]
        return found

    def missing(count: int) -> range:
        if not sums_norms_by_group(engine):
            return range(0)
        counts = told_by_all(count, engine.module._grid.get_pipe_parallel_group())
        return range(max(counts) - count)

    def completed(optimizer: Any) -> Any:
        filled(optimizer.param_groups)
        for _ in missing(len(optimizer.param_groups)):
            optimizer.add_param_group({"params": [placeholder()]})
        return optimizer

    if hasattr(client_optimizer, "param_groups"):
        return completed(client_optimizer), list(model_parameters)
    if client_optimizer is not None:
        return lambda parameters: completed(client_optimizer(parameters)), filled(model_parameters)
    groups = filled(model_parameters) or [placeholder()]
    more = [{"params": [placeholder()]} for _ in missing(len(groups) if isinstance(groups[0], dict) else 1)]
    return None, [*groups, *more] if not more or isinstance(groups[0], dict) else [{"params": groups}, *more]
