"""What an optimizer is given to train: nothing foreign, nothing left out unsaid, and placeholders.

These are parameters that stand where a rank, or one of its parameter groups, has nothing to train: optimizers refuse an
empty list, and upstream drops empty groups. Its optimizers for mixed precision and ZeRO-1 sum norms over the pipeline
once a group, so every rank must have as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.collectives import raise_everywhere, told_by_all
from deepspeed_pulse.engine.sharing.patched import ADVICE
from deepspeed_pulse.errors import ConfigError, first_of

PLACEHOLDER = "pulse_placeholder"
_SHOWN = 3
"""Names of parameters in a message."""


def is_placeholder(name: str) -> bool:
    """True for the name of a placeholder, which is nobody's parameter."""
    return name.startswith(PLACEHOLDER)


def add_placeholder(module: torch.nn.Module) -> tuple[str, torch.nn.Parameter]:
    """Give a module one more, of the device and dtype of its parameters; returns its name too."""
    name = f"{PLACEHOLDER}{sum(is_placeholder(key) for key, _ in module.named_parameters()) or ''}"
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(1))
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
    parameter.use_muon = False  # type: ignore[attr-defined]  # DeepSpeed has marked the others before
    module.register_parameter(name, parameter)
    return name, parameter


def completed(
    client_optimizer: Any, model_parameters: Iterable[Any], engine: Any, names: MutableMapping[Any, str]
) -> tuple[Any, list[Any]]:
    """What a user gives to train with (an optimizer, a factory or None, and parameters), complete and checked.

    Where upstream's optimizer needs it, ranks that have fewer parameter groups than others of their pipeline get more,
    of one placeholder each, whose ``names`` are added. An optimizer is checked now (:func:`check_covers`), what a
    factory makes when it is made. Collective.
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
        return range(max(_counts(count, engine)) - count)

    def checked(optimizer: Any) -> Any:
        filled(optimizer.param_groups)
        lacking = missing(len(optimizer.param_groups))
        raise_everywhere(_counted(len(lacking)) if lacking and _has_counted(engine) else None, "the optimizer")
        for _ in lacking:
            optimizer.add_param_group({"params": [placeholder()]})
        check_covers(optimizer.param_groups, engine.module)
        return optimizer

    if hasattr(client_optimizer, "param_groups"):
        return checked(client_optimizer), list(model_parameters)
    if client_optimizer is not None:
        return lambda parameters: checked(client_optimizer(parameters)), filled(model_parameters)
    groups = filled(model_parameters) or [placeholder()]
    more = [{"params": [placeholder()]} for _ in missing(len(groups) if isinstance(groups[0], dict) else 1)]
    groups = [*groups, *more] if not more or isinstance(groups[0], dict) else [{"params": groups}, *more]
    check_covers(groups, engine.module)
    return None, groups


def _counts(count: int, engine: Any) -> list[int]:
    """Parameter groups of the ranks of the pipeline, where they must have as many; collective there.

    Upstream's optimizers for ZeRO-1 and fp16 reduce norms over the pipeline once a group.
    """
    if not (engine.zero_optimization_stage() or engine.fp16_enabled()):
        return [count]
    return told_by_all(count, engine.module._grid.get_pipe_parallel_group())


def check_groups(optimizer: Any, engine: Any) -> None:
    """Refuse an optimizer of the config (Muon) that has parted the groups otherwise on each rank; collective."""
    counts = _counts(len(optimizer.param_groups), engine)
    problem = None
    if len(set(counts)) > 1:
        problem = ConfigError(
            f"optimizer: expected as many parameter groups of {type(optimizer).__name__} on every rank of the "
            f"pipeline, found {', '.join(map(str, counts))}: it parts matrices from other weights, and where a rank "
            "has one kind only, the others would wait for its norm for ever; give every rank both kinds (other cuts "
            "or fewer ranks), do without ZeRO and fp16, or take another optimizer"
        )
    raise_everywhere(problem, "the optimizer")


def _has_counted(engine: Any) -> bool:
    """Whether a script's learning rate schedule has counted the groups of its optimizer."""
    return hasattr(engine.client_lr_scheduler, "step")


def _counted(lacking: int) -> ConfigError:
    return ConfigError(
        f"rank {dist.get_rank()}: the optimizer lacks {lacking} parameter groups that other ranks of the pipeline "
        "have, and a learning rate schedule has counted its groups already; give every rank the same groups, empty "
        "ones too, or pass the schedule as a function that takes the optimizer"
    )


def check_covers(groups: Iterable[Any], module: torch.nn.Module) -> None:
    """Say which trainable parameters of a rank's module are left out; refuse foreign ones (:class:`ConfigError`).

    Collective in the world. ``groups``: parameter groups, or parameters.
    """
    given = {id(parameter): parameter for parameter in _parameters(groups)}
    mine = {id(parameter): (name, parameter) for name, parameter in module.named_parameters()}
    foreign = [parameter for key, parameter in given.items() if key not in mine]
    raise_everywhere(_refusal(foreign, len(given)) if foreign else None, "the optimizer cannot be built")
    trained = {key: name for key, (name, p) in mine.items() if p.requires_grad and not is_placeholder(name)}
    left_out = [name for key, name in trained.items() if key not in given]
    everywhere = list(dict.fromkeys(name for names in told_by_all(left_out) for name in names))
    if everywhere and dist.get_rank() == 0:
        print(
            f"pulse: the optimizer was not given {len(everywhere)} trainable parameters, which stay as they are: "
            f"{first_of(everywhere, _SHOWN)}; requires_grad_(False) saves their gradients",
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
        f"itself; build it from module.parameters() after PipelineModule(...); of an adapter of your own, {ADVICE}"
    )
