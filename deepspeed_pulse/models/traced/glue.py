"""Functions of a model's code that are kept whole: a call of one is one call of the trace, as that of a leaf is.

Such a function may read the numbers in tensors. It runs as it is when its layer runs; the trace needs the sizes of its
result only (:mod:`.trying`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from deepspeed_pulse.errors import GraphError, did_you_mean
from deepspeed_pulse.models.families import Glue


def functions(glue: Glue) -> tuple[Callable[..., Any], ...]:
    """The functions that are named; raises :class:`GraphError` for what cannot be found by its name."""
    if isinstance(glue, str) or not isinstance(glue, Sequence):
        raise GraphError(f'glue: expected a list of functions, or of names "package.module:function", found {glue!r}')
    found = tuple(_named(one) if isinstance(one, str) else one for one in glue)
    for given, one in zip(glue, found, strict=True):
        if not inspect.isfunction(one) or "<locals>" in one.__qualname__:
            raise GraphError(
                f"glue: expected a function that stands in a module, or a staticmethod of a class, found {given!r}"
            )
    return found


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except (ImportError, ValueError) as problem:
        raise GraphError(f'glue: expected "package.module:function", found {name!r}: {problem}') from problem
    for part in path.split("."):
        if not hasattr(found, part):
            raise GraphError(f"glue: {name!r}: no {part!r} in {module}{did_you_mean(part, vars(found))}")
        found = getattr(found, part)
    return found


@contextmanager
def kept_whole(
    kept: Sequence[Callable[..., Any]], model: nn.Module, record: Callable[[Any, Any, Any], Any]
) -> Iterator[None]:
    """While this thread's calls of functions go to ``record(function, args, kwargs)``, wherever they are named."""
    before = [
        (place, name, vars(place)[name], _recording(function, record))
        for function in kept
        for place, name in _places(function, model)
    ]
    for place, name, had, now in before:
        setattr(place, name, staticmethod(now) if isinstance(had, staticmethod) else now)
    try:
        yield
    finally:
        for place, name, had, _ in before:
            setattr(place, name, had)


def _recording(function: Callable[..., Any], record: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return function(*args, **kwargs)
        return record(function, args, kwargs)

    return recorded


def _places(function: Callable[..., Any], model: nn.Module) -> list[tuple[Any, str]]:
    """Where a function is an attribute: of modules that import it, of its class, of parts of the model."""
    around: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split(".")[:-1]:
        around = getattr(around, part, None)
    places = [
        *filter(inspect.ismodule, sys.modules.values()),
        *([around] if inspect.isclass(around) else []),
        *model.modules(),
    ]
    return [
        (place, name)
        for place in places
        for name, value in list(vars(place).items())
        if value is function or (type(value) is staticmethod and value.__func__ is function)
    ]
