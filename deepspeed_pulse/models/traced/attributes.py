"""What modules hold as attributes, and what has become of it.

Code between blocks may set an attribute of a block, or of what a block can reach. In a trace it does so on a copy; the
block that a layer calls would never see it.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from deepspeed_pulse.models.traced.built import PLAIN

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Where torch keeps a module's weights and the modules inside it."""

ABSENT = object()
_DEPTH = 3
_Key = tuple[Any, ...]


class Change(NamedTuple):
    """An attribute of ``module``, by its name or by that of a part of it; ``before`` or ``now`` may be ABSENT."""

    module: nn.Module
    key: _Key
    before: Any
    now: Any

    @property
    def name(self) -> str:
        """Of a hook only that it is one: torch counts them by process."""
        if self.key[0] in REGISTRIES:
            return str(self.key[-1])
        return str(self.key[0]) if self.key[0].startswith("_") else ".".join(map(str, self.key))


class Attributes:
    """What modules hold, as it was when each was last looked at."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._had: dict[int, dict[_Key, Any]] = {}
        self.renew(modules)

    def renew(self, modules: Iterable[nn.Module]) -> None:
        """Look at some again."""
        self._had.update((id(module), _held(module)) for module in modules)

    def changes(self, modules: Iterable[nn.Module]) -> Iterator[Change]:
        """What is another now; of modules that were never looked at, nothing."""
        for module in modules:
            now = _held(module)
            had = self._had.get(id(module), now)
            for key in had if had.keys() == now.keys() else {**had, **now}:
                before, after = had.get(key, ABSENT), now.get(key, ABSENT)
                if before is not after and not _same(before, after) and not _is_cached(module, key):
                    yield Change(module, key, before, after)


def reached(module: nn.Module, among: Collection[int]) -> list[nn.Module]:
    """The modules inside one, itself included, and those elsewhere that its attributes lead to, by id ``among``."""
    found = {id(one): one for one in module.modules()}
    for part in list(found.values()):
        for value in vars(part).values():
            found |= {id(one): one for one in _modules_in(value) if id(one) in among}
    return list(found.values())


def _held(module: nn.Module) -> dict[_Key, Any]:
    """Attributes by name, and their parts by name and key: lists and the like are changed in place."""
    found: dict[_Key, Any] = {}
    for name, value in vars(module).items():
        found[name,] = value
        for key, part in _parts(value):
            found[name, key] = part
    return found


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list):
        return enumerate(value)
    if not _is_plain_object(value):
        return ()
    return [(name, part) for name, part in vars(value).items() if not name.startswith("_")]  # others are caches


def _is_cached(module: nn.Module, key: _Key) -> bool:
    """Whether it is a property that was computed when it was first read."""
    owner = module if len(key) == 1 else vars(module).get(key[0])
    return isinstance(inspect.getattr_static(type(owner), str(key[-1]), None), functools.cached_property)


def _is_plain_object(value: Any) -> bool:
    """An object of the model's code, as a state that blocks share."""
    if isinstance(value, (*PLAIN, tuple, Tensor, nn.Module, type, types.ModuleType, types.FunctionType)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one, or plain and equal; sizes are not compared, as that would fix them."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return isinstance(one, PLAIN) and bool(one == other)


def _modules_in(value: Any, depth: int = _DEPTH) -> Iterator[nn.Module]:
    """Modules that a value is, or leads to."""
    if isinstance(value, nn.Module):
        yield value
    elif depth and not isinstance(value, (*PLAIN, Tensor)):
        for part in _led_to(value):
            yield from _modules_in(part, depth - 1)


def _led_to(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set)):
        return value
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__]
    return list(vars(value).values()) if _is_plain_object(value) else ()
