"""Is what this package uses of DeepSpeed there? Found without making an instance of anything."""

from __future__ import annotations

import dis
import functools
import inspect
import pkgutil
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

import deepspeed

from deepspeed_pulse.engine.waist.names import NAMES, SINCE, SUPPORTED
from deepspeed_pulse.errors import ConfigError


@functools.cache
def check_names() -> None:
    """Raise a ConfigError for the first name that is not there and that no adapter stands in for."""
    for owner, names in NAMES.items():
        for name in names.split():
            if not has(owner, name) and f"{owner}.{name}" not in SINCE:
                raise ConfigError(
                    f"deepspeed: expected {owner}.{name}, which deepspeed {deepspeed.__version__} does not have; "
                    f"deepspeed_pulse works with {SUPPORTED}: pip install deepspeed=={SUPPORTED.split()[-1]}"
                )


def has(owner: str, name: str) -> bool:
    """Whether a module or class, given by its full name, has a name.

    Of a class: what it and its bases within DeepSpeed define, and what their functions set on objects (``self.x = 1``,
    ``parameter.x = 1``). Not what this package has set there.
    """
    found = _value(owner)
    return hasattr(found, name) if isinstance(found, ModuleType) else name in _names_of(owner)


def _value(path: str) -> object:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


@functools.cache
def _names_of(owner: str) -> frozenset[str]:
    upstream = [base for base in getattr(_value(owner), "__mro__", ()) if base.__module__.split(".")[0] == "deepspeed"]
    return frozenset(
        name
        for base in upstream
        for name in (*_defined_by(base), *vars(base).get("__annotations__", ()), *_set_in(base))
    )


def _defined_by(owner: type) -> Iterator[str]:
    ours = __name__.split(".")[0]
    for name, value in vars(owner).items():
        if str(getattr(value, "__module__", "")).split(".")[0] != ours:
            yield name


def _set_in(owner: type) -> Iterator[str]:
    for value in vars(owner).values():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if isinstance(function, FunctionType):
            yield from _set_by(function.__code__)


def _set_by(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _set_by(inner)
