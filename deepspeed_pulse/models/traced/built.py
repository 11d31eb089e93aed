"""How a module is built, as plain data: two that are told alike compute alike, but for their weights."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.models.traced.names import unset_fake_temporarily

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size)
_ELSEWHERE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_BOOKKEEPING = "_use_default_values"
"""What diffusers notes in a config for the next save, in an order that differs from process to process."""
_DEPTH = 3


@dataclass(frozen=True)
class Opaque:
    """Something that cannot be looked into, so it is like nothing but itself."""

    number: int


def built(name: str, module: nn.Module) -> tuple[Any, ...]:
    """A module without those inside it: its class, attributes, and the forms of its weights."""
    own = ((key, value) for key, value in sorted(vars(module).items()) if key not in _ELSEWHERE)
    tensors = (*module._parameters.items(), *module._buffers.items())
    weights = tuple((key, None if one is None else (tuple(one.shape), str(one.dtype))) for key, one in tensors)
    return name, named(type(module)), tuple((key, told(value)) for key, value in own), weights


def named(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


def told(value: Any, depth: int = _DEPTH) -> Any:
    """A value as tuples of words and numbers."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return (named(type(value)), *(told(one, depth) for one in value))
    if isinstance(value, (set, frozenset)):
        return (named(type(value)), *sorted(repr(told(one, depth)) for one in value))
    if isinstance(value, Mapping):
        items = ((str(key), told(one, depth)) for key, one in value.items() if key != _BOOKKEEPING)
        return (named(type(value)), *items)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), _numbers(value)
    if callable(value) and not isinstance(value, nn.Module):
        return _function(value, depth)
    if depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        return named(type(value)), tuple((key, told(one, depth - 1)) for key, one in sorted(vars(value).items()))
    return Opaque(id(value))


def is_plain(told: Any) -> bool:
    """Whether nothing in it is opaque."""
    return all(map(is_plain, told)) if isinstance(told, tuple) else not isinstance(told, Opaque)


def _numbers(tensor: Tensor) -> Any:
    """Of a tensor that has numbers, a hash of them."""
    if tensor.is_meta:
        return None
    if type(tensor) is not Tensor:
        return Opaque(id(tensor))
    with unset_fake_temporarily():  # a constant keeps its numbers in a trace
        flat: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return hashlib.sha256(flat).hexdigest()


def _function(value: Any, depth: int) -> Any:
    if isinstance(value, functools.partial):
        inside: Iterable[Any] = (value.func, value.args, value.keywords)
        return ("partial", *(told(one, depth) for one in inside))
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        closure = told([*cells, *(value.__defaults__ or ())], depth - 1) if depth else Opaque(id(value))
        return named(value), value.__code__.co_firstlineno, closure
    if inspect.isclass(value) or inspect.isroutine(value) or not hasattr(value, "__dict__"):
        return named(value)
    return (named(type(value)), told(dict(vars(value)), depth - 1)) if depth else Opaque(id(value))


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asked for
    except ValueError:
        return False
    return True
