"""The batch that a model is traced with: what of it is a tensor, and what is fixed."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.models.traced.names import pytree

DEFAULT_INPUT = "hidden"

_PLAIN = (numbers.Number, np.generic, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, tuple, set, slice)
"""What two batches can be compared by."""


@dataclass(frozen=True, kw_only=True)
class TensorForm:
    """Shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a batch: a tensor or a structure of tensors (``spec``), or something else (``plain``)."""

    keys: tuple[str, ...]
    forms: tuple[TensorForm, ...] = ()
    spec: Any = field(default=None, repr=False)
    plain: Any = None

    @property
    def name(self) -> str:
        return ".".join(self.keys)

    def tensors(self, value: Any, model: str) -> list[Tensor]:
        """The tensors of a batch's entry, which must be as many; a :class:`BatchError` else."""
        found = pytree.tree_leaves(value)
        if len(found) != len(self.forms) or not all(isinstance(one, Tensor) for one in found):
            raise BatchError(
                f"batch entry {self.name!r}: {model} was traced with {len(self.forms)} tensors there, found "
                f"{', '.join(type(one).__name__ for one in found) or 'nothing'}; make the list with an example_batch "
                "like this one"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Given:
    """The example: entries in order; ``first`` is the first layer's input. ``positional``: inputs are no dict.

    ``empty``: arguments that are dicts without entries. ``absent``: those that are None, in dicts too.
    """

    entries: tuple[Entry, ...]
    first: str
    positional: bool = False
    empty: tuple[tuple[str, ...], ...] = ()
    absent: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, example_batch: Any) -> Given:
        """From what a user passes: a dict of the arguments of the model's forward, a tensor, or (inputs, labels)."""
        inputs = example_batch
        if isinstance(inputs, (tuple, list)):
            if len(inputs) != 2:
                raise BatchError(
                    "example_batch: expected a dict of the arguments of the model's forward, or a batch "
                    f"(inputs, labels), found {len(inputs)} things"
                )
            inputs = inputs[0]
        if isinstance(inputs, Mapping):
            entries = tuple(_entries(inputs, ()))
            named = [one.name for one in entries if one.forms]
            if not named:
                raise BatchError("example_batch: expected at least one tensor among its entries, found none")
            first = DEFAULT_INPUT if DEFAULT_INPUT in named else entries[0].name
            if first not in named:
                raise BatchError(
                    f"example_batch: its first entry {first!r} is the first layer's input, so it must be a tensor, "
                    f"found {entries[0].plain!r}; put the entry that the model works on first"
                )
            empty, absent = (tuple(_paths(inputs, which)) for which in (_is_empty, _is_none))
            return cls(entries=entries, first=first, empty=empty, absent=absent)
        entry = _entry((DEFAULT_INPUT,), inputs)
        if entry is None or not entry.forms:
            raise BatchError(
                "example_batch: expected a dict of the arguments of the model's forward, a tensor, or a batch "
                f"(inputs, labels), found {type(inputs).__name__}"
            )
        return cls(entries=(entry,), first=DEFAULT_INPUT, positional=True)

    @property
    def device(self) -> torch.device:
        """Where the first layer's input is; the CPU for one on the meta device."""
        return on_device(self[self.first].forms[0].device)

    def __getitem__(self, name: str) -> Entry:
        return next(one for one in self.entries if one.name == name)

    def with_plain(self, plain: Mapping[str, Any]) -> Given:
        """Other values for what is no tensor."""
        return replace(
            self,
            entries=tuple(replace(one, plain=plain[one.name]) if one.name in plain else one for one in self.entries),
        )

    def with_forms(self, forms: Mapping[tuple[str, int], TensorForm]) -> Given:
        """Other shapes and dtypes."""
        entries = [
            replace(one, forms=tuple(forms.get((one.name, at), form) for at, form in enumerate(one.forms)))
            for one in self.entries
        ]
        return replace(self, entries=tuple(entries))


def as_given(example: Any, value: Any) -> Any:
    """A value with lists where the example has lists: engines hand on lists as tuples, and models tell them apart."""
    if not isinstance(value, (list, tuple)) or not isinstance(example, (list, tuple)):
        return value
    last = len(example) - 1
    inside = [as_given(example[min(at, last)], one) for at, one in enumerate(value)] if example else list(value)
    return inside if isinstance(example, list) else tuple(inside)


def on_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def form_of(tensor: Tensor) -> TensorForm:
    return TensorForm(shape=tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)


def _entries(inputs: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Entry]:
    for key, value in inputs.items():
        if not isinstance(key, str):
            raise BatchError(f"example_batch: expected names as keys, found {key!r}")
        if isinstance(value, Mapping):
            yield from _entries(value, (*above, key))
        elif (entry := _entry((*above, key), value)) is not None:
            _check_plain(entry)
            yield entry


def _paths(inputs: Mapping[str, Any], which: Callable[[Any], bool]) -> Iterator[tuple[str, ...]]:
    """Keys of what is ``which``, in dicts too."""
    for key, value in inputs.items():
        if which(value):
            yield (key,)
        elif isinstance(value, Mapping):
            yield from ((key, *keys) for keys in _paths(value, which))


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _is_none(value: Any) -> bool:
    return value is None


def _entry(keys: tuple[str, ...], value: Any) -> Entry | None:
    if value is None:
        return None
    leaves, spec = pytree.tree_flatten(value)
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    if not tensors:
        return Entry(keys=keys, plain=value)
    if len(tensors) < len(leaves):
        raise BatchError(
            f"example_batch: entry {'.'.join(keys)!r} has tensors and other things in one list; make the others "
            "entries of their own, or tensors"
        )
    return Entry(keys=keys, forms=tuple(map(form_of, tensors)), spec=spec)


def _check_plain(entry: Entry) -> None:
    """Raises a :class:`BatchError` for an object that two batches cannot be compared by."""
    for one in pytree.tree_leaves(entry.plain):
        if not isinstance(one, _PLAIN):
            raise BatchError(
                f"example_batch: entry {entry.name!r}: expected a tensor, a number, a word, or lists of these, found "
                f"{type(one).__name__}; make it a tensor"
            )
