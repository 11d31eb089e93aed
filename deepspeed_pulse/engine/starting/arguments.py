"""Arguments of ``PipelineModule`` that could only end in a traceback later: refused at once, on every rank alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.engine.frozen import FrozenSpec
from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.errors import ConfigError, GraphError
from deepspeed_pulse.ir.graph import Graph


def listed(layers: Any, where: str = "") -> list[Any]:
    """The layers of a list, a generator or an ``nn.Sequential``, each of a kind that can run.

    A ConfigError where it is no list of layers, a GraphError with its place for what is no layer, behind ``where``.
    """
    if isinstance(layers, (str, bytes, Mapping)) or not isinstance(layers, Iterable):
        raise ConfigError(
            f"{where}layers: expected a list of layers, an nn.Sequential for example, found {shown(layers)}"
        )
    found = list(layers)
    for index, layer in enumerate(found):
        is_class = isinstance(layer, type) and issubclass(layer, torch.nn.Module)
        if is_class or not (isinstance(layer, (Declared, upstream.LayerSpec)) or callable(layer)):
            what = shown(layer)
            if is_class:
                what = f"the class {layer.__name__} itself (LayerSpec({layer.__name__}, ...) builds one)"
            raise GraphError(
                f"{where}layer {index}: expected a LayerSpec, spec(...), a module or a function, found {what}"
            )
    return found


def check_arguments(graph: Graph, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of another kind than ``PipelineModule`` takes, and with a GraphError a cut at no layer.

    A ConfigError names the argument, what was expected and what was found.
    """
    _check_kinds(_KINDS, arguments)
    for name, part in (arguments["frozen"] or {}).items():
        _check_part(name, part)
    method = arguments["partition_method"]
    if method is not None and not isinstance(method, str):
        _check_cuts(graph, method)


def check_methods(found: type) -> None:
    """Raise a ConfigError for a subclass of ``PipelineModule`` with a ``forward``, which a plan would never call."""
    owner = next(owner for owner in found.__mro__ if "forward" in vars(owner))
    if not owner.__module__.startswith("deepspeed_pulse."):
        raise ConfigError(
            f"{owner.__qualname__}.forward would never run: under a plan the engine calls a rank's layers stage by "
            'stage, not the module; put what it does into layers, or set "enabled": false in the "pulse" block'
        )


def _check_kinds(kinds: Kinds, given: Mapping[str, Any], where: str = "") -> None:
    for name, (is_right, expected) in kinds.items():
        value = given[name]
        left_out = value is None and name not in _NEEDED
        if not left_out and not is_right(value):
            raise ConfigError(f"{where}{name}: expected {expected}, found {shown(value)}")


def _check_part(name: Any, part: Any) -> None:
    if not _is_word(name) or not isinstance(part, FrozenSpec):
        raise ConfigError(
            f"frozen: expected a FrozenSpec under the name that layers pop, found {shown(part)} under {shown(name)}"
        )
    _check_kinds(_KINDS_OF_A_PART, vars(part), f"frozen part {name!r}: ")
    listed(part.layers if _is_list(part.layers) else [part.layers], f"frozen part {name!r}: ")


def _check_cuts(graph: Graph, cuts: Sequence[Any]) -> None:
    """Inner cuts are the first layers of stages, by index or by name; how many it takes depends on the placement."""
    for cut in cuts:
        if not isinstance(cut, str) and not _is_integer(cut):
            raise ConfigError(
                f"partition_method: expected cuts by layer index or name, found {shown(cut)} in {shown(cuts)}"
            )
    indices = [graph.index_of(cut) if isinstance(cut, str) else cut for cut in cuts]
    whole = [0, *indices, len(graph.layers)]
    if any(a >= b for a, b in itertools.pairwise(whole)):
        raise ConfigError(
            f"partition_method: expected strictly increasing cuts inside the {len(graph.layers)} layers (from 1 to "
            f"{len(graph.layers) - 1}), found {shown(cuts)}"
        )


def shown(value: Any) -> str:
    """A value for a message, cut at a length that a line can hold."""
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_topology(value: Any) -> bool:
    return callable(getattr(value, "get_axis_names", None)) and callable(getattr(value, "get_dim", None))


_NEEDED = ("base_seed", "input")
"""Arguments that None does not leave out."""

Kinds = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Per argument, whether a value is right, and what is expected."""

_KINDS: Kinds = {
    "topology": (_is_topology, "a ProcessTopology of DeepSpeed"),
    "loss_fn": (callable, "a function of the model's output and the labels"),
    "seed_layers": (lambda value: isinstance(value, int), "True or False"),
    "seed_fn": (callable, "a function of a seed"),
    "base_seed": (_is_integer, "an integer"),
    "partition_method": (
        lambda value: isinstance(value, str) or _is_list(value),
        "'profile', 'uniform', 'parameters', 'type:REGEX' or a list of cuts",
    ),
    "activation_checkpoint_interval": (_is_count, "a number of layers >= 0"),
    "activation_checkpoint_func": (callable, "a checkpoint function"),
    "checkpointable_layers": (lambda x: isinstance(x, list) and all(map(_is_word, x)), "a list of class names"),
    "dynamic_shape": (lambda value: isinstance(value, int), "True or False"),
    "input": (_is_word, "the name of the first layer's input"),
    "frozen": (lambda value: isinstance(value, Mapping), "FrozenSpecs by the name that layers pop"),
}
_KINDS_OF_A_PART: Kinds = {
    "input": (_is_word, "the name of what it reads"),
    "dtype": (lambda value: isinstance(value, torch.dtype), "a torch.dtype or None"),
    "ranks": (lambda value: _is_list(value) and all(map(_is_count, value)), "pipeline ranks or None"),
}
