"""What the costs of a job's layers depend on, as plain data: the name of a kept profile is a hash of it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.engine.measure.hardware import device_name
from deepspeed_pulse.engine.memory_order import order_of
from deepspeed_pulse.engine.observation.environment import local_ranks, version_of
from deepspeed_pulse.engine.plans.costs import PlanRequest, stand_in
from deepspeed_pulse.engine.sharing.closures import is_full
from deepspeed_pulse.engine.specs import TiedCall, unwrap
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.profile import Profile

MEASURING_VERSION = 8
"""Raised when layers are measured in another way, so that kept profiles are not used any more."""

LIBRARIES = ("torch", "torch_npu", "deepspeed", "diffusers", "transformers", "peft")
_OTHERS = frozenset((*sys.stdlib_module_names, *LIBRARIES))
"""Modules whose objects are told by their kinds: what is in them need not be the same in every run."""

_DEEPEST = 4
"""Of objects in objects."""

_OWN_OF_TORCH = frozenset(vars(torch.nn.Module()))


def job_content(request: PlanRequest) -> dict[str, Any]:
    """Of a job, all but the microbatch size that it is measured at."""
    assert request.example is not None
    inputs, entries = request.example
    return {
        "versions": [MEASURING_VERSION, *Profile.FORMATS, *library_versions()],
        "layers": _layers(request.graph, request.layers),
        "batch": {name: _plain(value) for name, value in {"": inputs, **entries}.items()},
        "cast": [str(request.dtype), str(request.buffer_dtype)],
        "microbatch size of the batch": request.microbatch_size,
        "optimizer": [request.rules.fused_optimizer, request.rules.shards_optimizer],
        **_machine(request.device),
    }


def frozen_content(
    parts: Mapping[str, tuple[Graph, Sequence[Any]]],
    given: Mapping[str, tuple[str, torch.dtype | None]],
    entries: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """The same of frozen parts, by name their graph and layers, for a batch of these entries.

    ``given``: by name, the entry that the first layer reads, and the dtype that the part runs in.
    """
    return {
        "versions": [MEASURING_VERSION, *library_versions()],
        "layers": {name: _layers(graph, layers) for name, (graph, layers) in parts.items()},
        "given": {name: [first, str(dtype)] for name, (first, dtype) in given.items()},
        "batch": {name: _plain(value) for name, value in entries.items()},
        **_machine(device),
    }


def _layers(graph: Graph, layers: Sequence[Any]) -> list[Any]:
    pairs = zip(graph.layers, layers, strict=True)
    return [[declared.name, declared.stash, declared.pop, code(layer)] for declared, layer in pairs]


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": [device.type, device_name(device)],
        # ranks of a host share its cores, and measure at the same time
        "sharing": [torch.get_num_threads(), local_ranks(), _world_size()] if device.type == "cpu" else None,
        "precision": [*_precision(device.type)],
    }


def _precision(device_type: str) -> Iterator[Any]:
    """How exactly a device computes in fp32, under which autocast, and whether it looks for the fastest kernels."""
    yield str(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None
    yield getattr(torch.backends, "fp32_precision", None)
    reads = (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32)
    for read in (*reads, torch.are_deterministic_algorithms_enabled):
        try:
            yield read()
        except RuntimeError:  # set under torch's newer names, which hide the older ones
            yield None
    yield torch.backends.cudnn.benchmark


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def library_versions() -> list[str]:
    """Of the libraries that layers and messages run in."""
    return [f"{name} {version_of(name) or 'none'}" for name in LIBRARIES]


def code(layer: Any) -> Any:
    """What a layer of the list computes: its modules with their parameters, settings and sources, or its function."""
    bare, found = unwrap(layer), stand_in(layer)
    forward_fn = getattr(bare, "forward_fn", None) if isinstance(bare, upstream.LayerSpec) else None
    module = found.module if isinstance(found, TiedCall) else found
    if not isinstance(module, torch.nn.Module):
        return _function(module)
    modules: dict[str, list[Any]] = {}
    for name, part in module.named_modules():
        own = {attribute: _plain(value) for attribute, value in vars(part).items() if attribute not in _OWN_OF_TORCH}
        modules[name] = [_named(type(part)), part.extra_repr(), own]
    kinds: set[Any] = {base for part in module.modules() for base in type(part).__mro__}
    return {
        "forward_fn": None if forward_fn is None else _function(forward_fn),
        "modules": modules,
        "parameters": {name: [_plain(p), p.requires_grad] for name, p in module.named_parameters()},
        "sources": {_named(kind): _source(kind) for kind in kinds},
    }


def _function(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return [_function(function.func), _plain(function.args), _plain(function.keywords)]
    closure = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if is_full(cell)]
    own = _plain(vars(function)) if hasattr(function, "__dict__") else None
    kind: Any = function if inspect.isroutine(function) else type(function)
    return [_named(kind), _source(kind), _plain(closure), _plain(getattr(function, "__defaults__", None)), own]


def _named(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


@functools.cache
def _source(kind: Any) -> str:
    """Text of a class or function; of a library's its version says as much."""
    if str(getattr(kind, "__module__", "")).split(".")[0] in LIBRARIES:
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # built in, or made at run time
        return ""


def _plain(value: Any, depth: int = _DEEPEST) -> Any:
    """Of values their content where it is plain or the program's own, of tensors shape and dtype, else the kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        order = order_of(value)
        return [list(value.shape), str(value.dtype), *([] if order is None else [list(order)])]
    if isinstance(value, (tuple, list)):
        return [_plain(item, depth) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item, depth) for name, item in value.items()}
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if inspect.isroutine(value) or inspect.isclass(value):
        return _named(value)
    kind = type(value)
    if depth == 0 or not hasattr(value, "__dict__") or not (_is_settings(value) or _is_own(kind)):
        return _named(kind)
    return [
        _named(kind),
        _source(cast(Any, kind)),
        {name: _plain(item, depth - 1) for name, item in vars(value).items()},
    ]


def _is_settings(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, (types.SimpleNamespace, argparse.Namespace))


def _is_own(kind: type) -> bool:
    """Of the program, and no module: those of a layer are told one by one."""
    return kind.__module__.split(".")[0] not in _OTHERS and not issubclass(kind, torch.nn.Module)
