"""Weights that a function reads without being a module: in its closure, its arguments, its object, its globals."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule

_LAYERS = frozenset({"forward_funcs", "tied_modules"})
"""Where upstream's module keeps its layers: of weights there the optimizer and checkpoints know."""

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "deepspeed", "diffusers", "transformers"}
"""Functions of these hold no weights of a model."""


def weights_reached(function: Any) -> list[torch.Tensor]:
    """Trainable tensors that a function, method, partial or callable object reaches, as far as its code names them.

    Of a module that it reaches, the code may name attributes (``embed.weight``, ``self.scale``): then only
    these count. A module without a named attribute counts whole, as it is called or handed on. The pipeline module
    itself never does: its functions often hold it for its settings, also while it is made.
    """
    return list(dict.fromkeys(_Reader(_is_trained).of_function(function)))


def tensors_reached(*functions: Any) -> list[torch.Tensor]:
    """All tensors that functions reach so, trained or not."""
    reader = _Reader(lambda tensor: True)
    return list(dict.fromkeys(tensor for function in functions for tensor in reader.of_function(function)))


def _is_trained(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


class _Reader:
    def __init__(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        self._wanted = wanted
        self._seen: dict[tuple[int, str], Any] = {}

    def of_function(self, function: Any) -> Iterator[torch.Tensor]:
        """What a callable reaches."""
        if isinstance(function, partial):
            names = _names(_code(function.func))
            yield from self.of_function(function.func)
            yield from self._of_all([*function.args, *function.keywords.values()], names)
        elif isinstance(function, MethodType):
            yield from self._of_attributes(function.__self__, _names(_code(function)))
            yield from self.of_function(function.__func__)
        elif isinstance(function, FunctionType):
            if str(function.__module__).split(".")[0] in _LIBRARIES or not self._is_new(function):
                return
            names = _names(function.__code__)
            cells = [cell.cell_contents for cell in function.__closure__ or () if is_full(cell)]
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            globals_ = [function.__globals__[name] for name in names if name in function.__globals__]
            yield from self._of_all([*cells, *defaults, *globals_], names)
        elif isinstance(_method(function), FunctionType):
            yield from self.of_function(MethodType(_method(function), function))

    def _of_all(self, values: Iterable[Any], names: Iterable[str]) -> Iterator[torch.Tensor]:
        for value in values:
            yield from self._of_value(value, names)

    def _of_value(self, value: Any, names: Iterable[str]) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            if self._wanted(value):
                yield value
        elif isinstance(value, torch.nn.Module):
            if isinstance(value, PipelineModule) or any(_has(value, name) for name in names):
                yield from self._of_attributes(value, names)
            else:
                yield from filter(self._wanted, itertools.chain(value.parameters(), value.buffers()))
        elif isinstance(value, (FunctionType, MethodType, partial)):
            yield from self.of_function(value)
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            if self._is_new(value):
                yield from self._of_all(value.values() if isinstance(value, dict) else value, names)
        elif not isinstance(value, type):
            yield from self._of_attributes(value, names)

    def _of_attributes(self, owner: Any, names: Iterable[str]) -> Iterator[torch.Tensor]:
        """Of an object or module, what its named attributes reach."""
        for name in names:
            if _has(owner, name) and self._is_new(owner, name):
                yield from self._of_value(getattr(owner, name), names)

    def _is_new(self, item: Any, name: str = "") -> bool:
        found = (id(item), name) not in self._seen
        self._seen[id(item), name] = item  # held, so that no other has its id
        return found


def _has(owner: Any, name: str) -> bool:
    """An attribute of the object's own or a method of its class, torch's base class aside; reading it runs no code."""
    if name in _LAYERS and isinstance(owner, PipelineModule):
        return False
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        return isinstance(owner, torch.nn.Module) and any(
            name in owner.__dict__.get(kept, ()) for kept in ("_parameters", "_modules", "_buffers")
        )
    if isinstance(found, (property, staticmethod)) or found is getattr(torch.nn.Module, name, None):
        return False
    return name in getattr(owner, "__dict__", {}) or isinstance(found, FunctionType)


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None) or getattr(_method(function), "__code__", None)


def _method(called: Any) -> Any:
    """What runs when an object is called."""
    return inspect.getattr_static(type(called), "__call__", None)


def _names(code: CodeType | None) -> dict[str, None]:
    """Attributes and globals that code names, functions inside it included, in order."""
    if code is None:
        return {}
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)]
    return dict.fromkeys([*code.co_names, *inner])


def is_full(cell: Any) -> bool:
    """False for a cell of a closure whose variable has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
