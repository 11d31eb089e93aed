"""Optimizers that reckon with the whole model in each step, of which a rank of a pipeline holds a part."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from deepspeed import comm as dist

from deepspeed_pulse.engine.collectives import raise_everywhere
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.engine.gradients.stepped import parameter_groups
from deepspeed_pulse.errors import ConfigError

_COLLECTIVES = """
    all_gather all_gather_into_tensor all_gather_object all_gather_single all_reduce all_to_all all_to_all_single
    broadcast broadcast_object_list reduce_scatter reduce_scatter_single reduce_scatter_tensor
"""
_SUMS_ESTIMATE = "fsdp_in_use"
"""Option of Prodigy and D-Adaptation: their estimate is summed over all ranks."""
_SWITCHES = (_SUMS_ESTIMATE, "model_sharding")
"""Options, of a group or of the optimizer, without which a step that can speak to other ranks does not."""

_ESTIMATE = "d"
_ADAPTED = """
    d d_denom d_hat d_max d_numerator d_prev effective_lr g0_norm gsq_weighted k max_d_numerator numerator_weighted
    prev_d_numerator running_d_denom running_d_numerator shared_d sk_l1 sk_sq_weighted skl1 sksq_weighted weight_sum
"""
"""What the packages prodigyopt, dadaptation, prodigy-plus-schedule-free and pytorch_optimizer keep in a group beside
what a user has set."""


def as_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options without what its optimizer adapts to the weights that it has."""
    adapted = _ADAPTED.split() if _ESTIMATE in options else []
    return {key: value for key, value in options.items() if key not in adapted}


def estimate_of(options: Mapping[str, Any]) -> float:
    """How far an adapted learning rate has grown; 0 of any other."""
    return float(options.get(_ESTIMATE, 0.0))


def check_optimizer(engine: Any) -> None:
    """Raise a :class:`ConfigError` for an optimizer whose step counts on ranks that hold the same; collective."""
    problem = None if engine.module.num_stages == 1 else _problem(engine)
    raise_everywhere(problem, "the optimizer")


def own_rates(engine: Any) -> Iterator[str]:
    """What is said of an optimizer that adapts one learning rate to all weights that it steps.

    That is another than in one process where each rank steps others, and than alone where backbones step together.
    """
    optimizer, module = engine.basic_optimizer, engine.module
    # each replica steps a part of flat buffers
    parted = engine.dp_world_size > 1 and (engine.zero_optimization() or engine.using_bf16_optimizer)
    groups = [group for group in getattr(optimizer, "param_groups", []) if _ESTIMATE in group]
    what = f"warning: {type(optimizer).__name__} estimates one learning rate of all weights that it steps"
    if (module.num_stages > 1 or parted) and not all(group.get(_SUMS_ESTIMATE) for group in groups):
        yield (
            f"{what}, and each rank steps others: every rank trains with a learning rate of its own, which one process "
            f"would not. One process's: num_stages=1 without ZeRO and bf16, or {_SUMS_ESTIMATE}=True where the "
            "optimizer has it, on CUDA"
        )
    if groups and module.has_several and not module.plan.carries:
        yield (
            f"{what}, and steps all backbones together: they share it, and none trains as it would alone; "
            '"backbone_steps": "each" in the "pulse" block gives each its own'
        )


def _problem(engine: Any) -> ConfigError | None:
    optimizer = engine.basic_optimizer
    name = type(optimizer).__name__
    if _SUMS_ESTIMATE in _switched_on(optimizer):
        if _trains_something(engine):
            return None
        return ConfigError(
            f"{name}({_SUMS_ESTIMATE}=True): expected weights to train on every rank, found none on rank "
            f"{dist.get_rank()}, which would end its step where the others wait for it; take other cuts or fewer "
            f"ranks, or {_SUMS_ESTIMATE}=False, with which each rank estimates a learning rate of its own"
        )
    found = _collective_in(type(optimizer))
    if found is None or _is_told_not_to(optimizer) or _has_smaller_group(optimizer):
        return None
    return ConfigError(
        f"optimizer: expected one that steps the weights of its rank, found {name}, whose step calls {found} as if "
        "all ranks had the same weights: ranks of a pipeline have others, and would write over them or wait for ever; "
        'take its variant for one device (SingleDeviceMuonWithAuxAdam), torch.optim.Muon, "optimizer": {"type": '
        '"Muon"} of the config, or switch it off (model_sharding=False)'
    )


def _switched_on(optimizer: Any) -> set[str]:
    return {name for name in _SWITCHES if any(_settings(optimizer, name))}


def _is_told_not_to(optimizer: Any) -> bool:
    return any(_settings(optimizer, name) for name in _SWITCHES) and not _switched_on(optimizer)


def _settings(optimizer: Any, name: str) -> list[Any]:
    """An option as the optimizer and its groups have it."""
    own = [getattr(optimizer, name)] if hasattr(optimizer, name) else []
    return [*own, *(group[name] for group in optimizer.param_groups if name in group)]


def _has_smaller_group(optimizer: Any) -> bool:
    """It speaks to some ranks only: a script that gives it a group knows which hold the same."""
    group = getattr(optimizer, "process_group", None)
    return group is not None and dist.get_world_size(group) < dist.get_world_size()


def _trains_something(engine: Any) -> bool:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    held = [names.get(id(p), "") for group in parameter_groups(engine.optimizer) for p in group]
    return not all(map(is_placeholder, held))


def _collective_in(kind: type) -> str | None:
    """The name of a collective in the code of a class's ``step``, or of a method that it calls; None without one."""
    waiting, seen = ["step"], {"step"}
    while waiting:
        method: Any = getattr(kind, waiting.pop(), None)
        code = getattr(inspect.unwrap(method), "__code__", None)
        for name in () if code is None else _names_in(code):
            if hasattr(kind, name):
                waiting += [name] if name not in seen else []
                seen.add(name)
            elif name in _COLLECTIVES.split():
                return name
    return None


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
