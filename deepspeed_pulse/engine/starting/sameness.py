"""All ranks must bring the same: layer lists, arguments and configs are described in words and compared."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.engine.memory_order import order_of
from deepspeed_pulse.engine.specs import describe, unwrap
from deepspeed_pulse.errors import ConfigError, GraphError

Facts = dict[str, Any]
"""What is compared, by the name of the argument; plain values."""

OF_ONE_RANK = frozenset(
    {"tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler", "dump_state", "nebula", "aio"}
    | {"local_rank", "rank", "global_rank", "node_rank"}
)
"""Keys of a DeepSpeed config that may differ between ranks: what is written where, and which rank it is."""

PATHS = frozenset({"profile", "cluster", "plan", "plan_cache", "trace"})
"""Keys of the ``"pulse"`` block of which ranks may have paths of their own: all have one, or none has."""

SHOWN = 240
"""Characters of a description in a message."""


def layer_facts(index: int, layer: Any) -> list[Any]:
    """A layer of the list: its name, class, arguments, named values, parameters and buffers."""
    declared = describe(index, layer)
    names = {"stash": list(declared.stash), "pop": list(declared.pop)}
    return [declared.name, {name: given for name, given in names.items() if given}, plain(unwrap(layer))]


def config_facts(config: Mapping[str, Any] | None) -> Facts:
    """The keys of a DeepSpeed config that ranks must agree on."""
    config = config or {}
    found = {f"config: {key}": plain(value) for key, value in config.items() if key not in {*OF_ONE_RANK, "pulse"}}
    block = config.get("pulse")
    if isinstance(block, Mapping):
        block = {k: ("a path" if v not in (None, "auto") else v) if k in PATHS else plain(v) for k, v in block.items()}
    return {**found, 'config: "pulse"': block}


def plain(value: Any) -> Any:
    """Plain values as they are, modules by classes and shapes, functions and objects by name, tensors by shape.

    Of objects of others the class alone: settings that a script hands to its layers hold its rank and seed too.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        # ranks have devices of their own
        return {str(name): plain(item) for name, item in value.items() if name != "device"}
    if isinstance(value, (torch.Tensor, torch.nn.Module, upstream.LayerSpec)):
        return _of_torch(value)
    if isinstance(value, partial):
        return [plain(value.func), plain(value.args), plain(value.keywords)]
    is_ours = type(value).__module__.startswith("deepspeed_pulse.")
    if is_dataclass(value) and not isinstance(value, type) and is_ours:
        return [_named(value), plain(vars(value))]
    return str(value) if isinstance(value, torch.dtype) else _named(value)


def _of_torch(value: torch.Tensor | torch.nn.Module | upstream.LayerSpec) -> Any:
    if isinstance(value, torch.Tensor):
        order = order_of(value)
        strides = "" if order is None else f" with strides {order}"
        return f"{tuple(value.shape)} {value.dtype}{strides}{'' if value.requires_grad else ' frozen'}"
    if isinstance(value, upstream.LayerSpec):
        modules = {name: plain(given) for name, given in vars(value).items() if isinstance(given, torch.nn.Module)}
        tied = [plain(getattr(value, name, None)) for name in ("key", "forward_fn", "tied_weight_attr")]
        return [_named(value.typename), plain(value.module_args), plain(value.module_kwargs), tied, modules]
    tensors = (*value.named_parameters(remove_duplicate=False), *value.named_buffers(remove_duplicate=False))
    kinds = {}
    for name, module in value.named_modules():
        # what others say of themselves may be of one rank
        own = type(module).__module__.startswith("torch.")
        kinds[name] = f"{_named(type(module))} {module.extra_repr() if own else ''}"
    return [_named(type(value)), kinds, {name: plain(tensor) for name, tensor in tensors}]


def _named(value: Any) -> Any:
    """A class or function with a digest of its source, or the class of an object."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return f"an object of {type(value).__module__}.{type(value).__qualname__}"
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    return [name, _digest(value.__code__.co_code.hex())] if inspect.isfunction(value) else name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_same(facts: Facts, where: str) -> None:
    """Compare this rank's with all ranks of the world; collective. ``where``: what was called with them.

    The first difference is every rank's GraphError (of layers) or ConfigError.
    """
    digests = told_by_all({name: _digest(json.dumps(found, sort_keys=True)) for name, found in facts.items()})
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is None:
        return
    names = dict.fromkeys((*digests[0], *digests[other]))
    name = next(name for name in names if digests[0].get(name) != digests[other].get(name))
    found = told_by_all(facts.get(name, _ABSENT))
    first, second = found[0], found[other]
    if name == "layers":
        raise GraphError(_layers_differ(first, second, other, where))
    raise ConfigError(
        f"{where}: ranks 0 and {other} differ in {name}: rank 0 has {_short(first)}, rank {other} has "
        f"{_short(second)}; give every rank the same"
    )


_ABSENT = "nothing"


def _layers_differ(first: Sequence[Any], second: Sequence[Any], other: int, where: str) -> str:
    ending = "build the same layer list on every rank"
    if len(first) != len(second):
        return f"{where}: rank 0 has {len(first)} layers, rank {other} has {len(second)}; {ending}"
    index = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    one, two = _parting(first[index], second[index])
    return (
        f"{where}: ranks 0 and {other} differ in layer {index}: rank 0 has {first[index][0]} with {_short(one)}, rank "
        f"{other} has {second[index][0]} with {_short(two)}; {ending}"
    )


def _parting(first: Any, second: Any) -> tuple[Any, Any]:
    """The innermost parts that differ."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = list(zip(first, second, strict=True))
    elif isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        pairs = [({name: first[name]}, {name: second[name]}) for name in first]
        if len(pairs) == 1:
            return first, second
    else:
        return first, second
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    return _parting(*differing[0]) if len(differing) == 1 else (first, second)


def _short(found: Any) -> str:
    text = found if found == _ABSENT else json.dumps(found)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
