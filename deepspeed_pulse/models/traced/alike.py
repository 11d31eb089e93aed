"""Leaves that are built alike: what one gives for a kind of input, the next one gives too.

Running a block without numbers takes as long as it has operations, and a model has many blocks that differ in their
weights only. Only shapes come from here; what a leaf computes is computed when its layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.models.traced.built import PLAIN, built
from deepspeed_pulse.models.traced.names import pytree


@dataclass(frozen=True, kw_only=True)
class Result:
    """Shapes, strides and dtypes of what a leaf gave; ``once``: it drew random numbers."""

    forms: tuple[tuple[tuple[Any, ...], tuple[Any, ...], torch.dtype, torch.device] | None, ...]
    spec: Any
    once: bool

    def tensors(self) -> Any:
        """New tensors of these forms."""
        made = [
            None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2], device=form[3])
            for form in self.forms
        ]
        return pytree.tree_unflatten(made, self.spec)


class Alike:
    """What leaves gave in one trace, by how they are built and what they were given."""

    def __init__(self) -> None:
        self._built: dict[int, Any] = {}
        self._found: dict[Any, Result] = {}

    def key(self, module: nn.Module, leaves: Sequence[Any], spec: Any) -> Any:
        """Of a call; None for one that is given what cannot be compared."""
        told = given(leaves)
        if told is None:
            return None
        if id(module) not in self._built:
            self._built[id(module)] = tuple(built(name, part) for name, part in module.named_modules())
        return self._built[id(module)], told, str(spec)

    def find(self, key: Any) -> Result | None:
        return None if key is None else self._found.get(key)

    def put(self, key: Any, result: Result) -> None:
        self._found[key] = result

    def keep(self, key: Any, result: Any, given: Iterable[Tensor], once: bool) -> Result | None:
        """Remember a result, unless a part of it lies in memory that the call was given, or twice in its own."""
        leaves, spec = pytree.tree_flatten(result)
        if key is None or not all(one is None or isinstance(one, Tensor) for one in leaves):
            return None
        memory = [one.untyped_storage()._cdata for one in leaves if one is not None]
        if len(set(memory)) < len(memory) or set(memory) & {one.untyped_storage()._cdata for one in given}:
            return None
        forms = tuple(
            None if one is None else (tuple(one.shape), tuple(one.stride()), one.dtype, one.device) for one in leaves
        )
        self._found[key] = found = Result(forms=forms, spec=spec, once=once)
        return found


def given(leaves: Sequence[Any], told_size: Callable[[Any], str] = str) -> tuple[Any, ...] | None:
    """What a call is given and what is set around it; None where a part cannot be told.

    ``told_size`` tells an expression of sizes.
    """
    told = [_told(one, told_size) for one in leaves]
    kinds = dict.fromkeys(["cpu", *(one.device.type for one in leaves if isinstance(one, Tensor))])
    return None if None in told else (*told, torch.is_grad_enabled(), *map(_autocast, kinds))


def _told(one: Any, told_size: Callable[[Any], str]) -> Any:
    if isinstance(one, Tensor):
        shape, stride = (
            tuple(told_size(size.node.expr) if isinstance(size, torch.SymInt) else size for size in found)
            for found in (one.shape, one.stride())
        )
        return "tensor", shape, stride, str(one.dtype), str(one.device), one.is_conj()
    if isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "size", told_size(one.node.expr)
    return (type(one).__name__, repr(one)) if isinstance(one, PLAIN) else None


def _autocast(kind: str) -> tuple[bool, str]:
    return torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))
