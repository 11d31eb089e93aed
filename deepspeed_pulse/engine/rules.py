"""What a model that became a layer list says about the entries of a batch."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.specs import unwrap
from deepspeed_pulse.errors import BatchError

EXAMPLE = "make the list with an example_batch that has it"
"""What to do where a list was made with an example."""

WITHOUT_FLOAT64 = ("mps", "npu")
"""Accelerators on which models make shorter numbers."""


@dataclass(frozen=True, kw_only=True)
class NumberType:
    """What a model makes of a Python number: a tensor of one of these types."""

    whole: torch.dtype
    fraction: torch.dtype

    def tensor(self, number: Any) -> torch.Tensor:
        """The number as a tensor without dimensions."""
        dtype = self.fraction if isinstance(number, float) else self.whole
        if dtype is torch.float64 and get_accelerator().device_name() in WITHOUT_FLOAT64:
            dtype = torch.float32
        return torch.tensor(number, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class EntryRules:
    """Rules of one model; ``model`` is the name of its class."""

    model: str
    numbers: Mapping[str, NumberType]
    """Entries that it also takes as Python numbers."""
    tensors: frozenset[str]
    """Other entries that its layers pop."""
    unread: Mapping[str, str]
    """Entries that its own forward would read and its layers do not, each with what to do."""
    read: frozenset[str] = frozenset()
    """Dotted names of the entries that it was made with."""
    nested: frozenset[str] = frozenset()
    """Entries that are dicts, which it reads whole: names below them that are not among ``read`` are unread."""
    takes_any: bool = False
    """Whether its own forward takes any name, so that each that is not among ``read`` is unread."""

    def __deepcopy__(self, memo: Any) -> EntryRules:
        return self  # copies of a layer come from the same model

    def apply(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The entries with tensors in place of numbers.

        A BatchError for one that the layers should read and do not, or a number where a tensor is expected.
        """
        for name, value in entries.items():
            if (unread := self._unread(name, value)) is not None:
                reads, advice = unread
                raise BatchError(
                    f"the batch has {name!r}, which {self.model} {reads} and no layer of this list does: {advice}, or "
                    "leave it out of the batch",
                    more="unread-entry",
                )
        found = dict(entries)
        for name, value in entries.items():
            if isinstance(value, numbers.Real) and name in self.numbers:
                found[name] = self.numbers[name].tensor(value)
            elif isinstance(value, numbers.Real) and name in self.tensors:
                raise BatchError(
                    f"batch entry {name!r}: {self.model} takes a tensor, found the number {value}; make it one: "
                    f"torch.full((batch_size,), {value})"
                )
        return found

    def _unread(self, name: str, value: Any) -> tuple[str, str] | None:
        """Of an entry that is not read and would be, how surely, and what to do; None for others.

        A forward that takes any name is not meant by a script's own words.
        """
        first = name.partition(".")[0]
        if (advice := self.unread.get(name, self.unread.get(first))) is not None:
            return "reads", advice
        if name in self.read:
            return None
        if first in self.nested:
            return "reads", EXAMPLE
        return ("may read", EXAMPLE) if self.takes_any and not _are_words(value) else None


def _are_words(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value))


def rules_of(layers: Iterable[Any], read: Iterable[str]) -> tuple[EntryRules, ...]:
    """The rules of all models in a list; what some layer or frozen part pops is ``read``, whatever a model says."""
    found: dict[int, EntryRules] = {}
    for layer in layers:
        for one in (getattr(layer, "unit", None), unwrap(layer)):
            for module in one.modules() if isinstance(one, torch.nn.Module) else ():
                rules = getattr(module, "entry_rules", None)
                if isinstance(rules, EntryRules):
                    found[id(rules)] = rules
    known = set(read)
    known |= {name.partition(".")[0] for name in known}
    return tuple(_without(one, known) for one in found.values())


def _without(rules: EntryRules, known: set[str]) -> EntryRules:
    unread = {name: what for name, what in rules.unread.items() if name not in known}
    return replace(rules, unread=unread, read=rules.read | known)
