"""Leaves that are built alike: what one gives for a kind of input, the next one gives too.

Running a block without numbers takes as long as it has operations, and a model has many blocks that differ in their
weights only. Only shapes come from here; what a leaf computes is computed when its layer runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.models.traced.names import pytree

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size)
_SKIPPED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


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
        told = []
        for one in leaves:
            if isinstance(one, Tensor):
                told.append(("tensor", *_form(one)))
            elif isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                told.append(("size", str(one.node.expr)))
            elif isinstance(one, _PLAIN):
                told.append((type(one).__name__, repr(one)))
            else:
                return None
        if id(module) not in self._built:
            self._built[id(module)] = tuple(_built(name, part) for name, part in module.named_modules())
        return self._built[id(module)], tuple(told), str(spec), torch.is_grad_enabled()

    def find(self, key: Any) -> Result | None:
        return None if key is None else self._found.get(key)

    def keep(self, key: Any, result: Any, given: Iterable[Tensor], once: bool) -> None:
        """Remember a result, unless a part of it lies in memory that the call was given, or twice in its own."""
        leaves, spec = pytree.tree_flatten(result)
        if key is None or not all(one is None or isinstance(one, Tensor) for one in leaves):
            return
        memory = [one.untyped_storage()._cdata for one in leaves if one is not None]
        if len(set(memory)) < len(memory) or set(memory) & {one.untyped_storage()._cdata for one in given}:
            return
        forms = tuple(
            None if one is None else (tuple(one.shape), tuple(one.stride()), one.dtype, one.device) for one in leaves
        )
        self._found[key] = Result(forms=forms, spec=spec, once=once)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    shape = tuple(str(size) for size in tensor.shape)
    return shape, tuple(str(step) for step in tensor.stride()), tensor.dtype, str(tensor.device), tensor.is_conj()


def _built(name: str, module: nn.Module) -> Any:
    own = ((key, value) for key, value in sorted(vars(module).items()) if key not in _SKIPPED)
    tensors = (*module._parameters.items(), *module._buffers.items())
    weights = tuple((key, None if one is None else (tuple(one.shape), one.dtype)) for key, one in tensors)
    return name, type(module), tuple((key, _told(value)) for key, value in own), weights


def _told(value: Any, depth: int = 2) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_told(one, depth) for one in value)
    if isinstance(value, Mapping):
        return type(value), tuple((str(key), _told(one, depth)) for key, one in value.items())
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if depth and hasattr(value, "__dict__") and not callable(value):
        return type(value), tuple((key, _told(one, depth - 1)) for key, one in sorted(vars(value).items()))
    return getattr(value, "__qualname__", type(value))
