"""What a user's optimizer trains, against what the module has: nothing foreign, and nothing left out unsaid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.collectives import raise_everywhere, told_by_all
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.errors import ConfigError

_SHOWN = 3


def covering(client_optimizer: Any, parameters: list[Any], module: torch.nn.Module) -> Any:
    """What a user gives to train with, checked: an optimizer now, what a factory makes when it is made.

    Args:
        client_optimizer: an optimizer, a factory, or None: the config's is built of the parameters.

    Raises:
        ConfigError: it is none of these, or :func:`check_covers` refuses it.
    """
    if client_optimizer is None:
        check_covers(parameters, module)
        return None
    if hasattr(client_optimizer, "param_groups"):
        check_covers(client_optimizer.param_groups, module)
        return client_optimizer

    def made(given: Any) -> Any:
        optimizer = client_optimizer(given)
        check_covers(optimizer.param_groups, module)
        return optimizer

    return made


def check_covers(groups: Iterable[Any], module: torch.nn.Module) -> None:
    """Refuse parameters that are not the module's; say which trainable ones are left out. Collective in the world.

    Args:
        groups: parameter groups, or parameters.
        module: this rank's.

    Raises:
        ConfigError: some rank's optimizer has a foreign parameter.
    """
    given = {id(parameter): parameter for parameter in _parameters(groups)}
    named = {name: parameter for name, parameter in module.named_parameters() if not is_placeholder(name)}
    mine = {id(parameter) for parameter in module.parameters()}
    foreign = [parameter for key, parameter in given.items() if key not in mine]
    raise_everywhere(_refusal(foreign, len(given)) if foreign else None, "the optimizer cannot be built")
    left_out = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in given]
    everywhere = list(dict.fromkeys(name for names in told_by_all(left_out) for name in names))
    if everywhere and dist.get_rank() == 0:
        more = f" and {len(everywhere) - _SHOWN} more" if len(everywhere) > _SHOWN else ""
        print(
            f"pulse: the optimizer was not given {len(everywhere)} trainable parameters, which stay as they are: "
            f"{', '.join(everywhere[:_SHOWN])}{more}; requires_grad_(False) saves their gradients",
            flush=True,
        )


def _parameters(groups: Iterable[Any]) -> Iterator[torch.Tensor]:
    for group in groups:
        found = group["params"] if isinstance(group, dict) else group
        yield from (found,) if isinstance(found, torch.Tensor) else found


def _refusal(foreign: list[torch.Tensor], given: int) -> ConfigError:
    return ConfigError(
        f"optimizer: expected parameters of the PipelineModule of this rank, found {len(foreign)} of {given} that are "
        f"not (the first of shape {list(foreign[0].shape)}): they would never be trained, or each rank's copy by "
        "itself; build it from module.parameters() after PipelineModule(...)"
    )
