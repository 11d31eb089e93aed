"""One backbone of a checkpoint, for a run that trains it alone or beside others: what it is called there and here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from deepspeed_pulse.engine.backbones import Head, layers_of
from deepspeed_pulse.engine.checkpoints.optimizer_state import MASTER, Groups, SavedState
from deepspeed_pulse.engine.checkpoints.record import CheckpointRecord
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.errors import ConfigError, PlanError, did_you_mean

TIED = "tied_modules"
"""Where upstream keeps tied layers, by key."""

FLAT = ("bit16_groups", "bf16_groups", "fp32_groups_flat")
"""Attributes of optimizers that keep the state of a group in one buffer."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """A backbone here and in a checkpoint.

    Attributes:
        here, there: its layers, of those of this run and of the checkpoint.
        key_here, key_there: what keys of its tied layers begin with.
    """

    name: str
    here: range
    there: range
    key_here: str
    key_there: str

    @classmethod
    def of(cls, name: str, heads: Sequence[Head], saved: CheckpointRecord | None, where: Path) -> Match:
        """The backbone called ``name``; a ConfigError where this run or the checkpoint has none of that name."""
        alone = len(heads) == 1
        here = heads[0].layers if alone else layers_of(heads, name, "load_checkpoint")
        theirs = {} if saved is None else {part.name: range(*part.layers) for part in saved.backbones}
        if alone and not theirs:
            raise ConfigError(
                f"load_checkpoint: backbone={name!r}: {where} is of one backbone, and so is this run; leave "
                "backbone= out"
            )
        if theirs and name not in theirs:
            raise ConfigError(
                f"load_checkpoint: {where} has no backbone {name!r}{did_you_mean(name, list(theirs))}; its backbones: "
                f"{', '.join(theirs)}"
            )
        there = theirs.get(name, range(len(here) if saved is None else len(saved.layers)))
        return cls(
            name=name,
            here=here,
            there=there,
            key_here="" if alone else f"{name}/",
            key_there=f"{name}/" if theirs else "",
        )

    @property
    def shift(self) -> int:
        """From the index of a layer here to that in the checkpoint."""
        return self.there.start - self.here.start

    def name_there(self, parameter: str) -> str | None:
        """What one of this run's parameters is called in the checkpoint; None for one of another backbone."""
        first, _, rest = parameter.partition(".")
        if first.isdigit() and int(first) in self.here:
            return f"{int(first) + self.shift}.{rest}"
        if first == TIED and rest.startswith(self.key_here):
            return f"{TIED}.{self.key_there}{rest.removeprefix(self.key_here)}"
        return None

    def _names(self, record: CheckpointRecord, layers: range) -> list[str]:
        return [_bare(record.layers[index], self.name, index) for index in layers]

    def check_layers(self, saved: CheckpointRecord, mine: CheckpointRecord, where: Path) -> None:
        """Raise a PlanError where its layers there are not those here."""
        own, found = self._names(mine, self.here), self._names(saved, self.there)
        for index, (there, here) in enumerate(zip_longest(found, own, fillvalue="none")):
            if there != here:
                raise PlanError(
                    f"{where}: backbone {self.name} has {len(found)} layers there and {len(own)} here; the first that "
                    f"differs is its layer {index}: {there} there, {here} here; build the same layer list"
                )


def _bare(name: str, backbone: str, index: int) -> str:
    """A layer's name without what only its place in the list of all gives it."""
    return name.removeprefix(f"{backbone}.").removeprefix(f"{index}.")


def own_names(match: Match, names: Mapping[Any, str]) -> dict[str, str]:
    """Of the backbone's parameters on this rank, the name in the checkpoint to the name here."""
    pairs = ((match.name_there(name), name) for name in names.values() if not is_placeholder(name))
    return {there: here for there, here in pairs if there is not None}


def renamed(state: SavedState, names: Mapping[str, str], groups: Groups, optimizer: Any) -> SavedState:
    """State of a backbone under this run's names.

    Options of a parameter group (its learning rate) are taken where the group has this backbone's parameters alone.

    Raises:
        PlanError: a group's state is one buffer with one count of steps, and the group has other parameters too.
    """
    mine = set(names.values())
    mixed = {name for group in groups for name in group if mine.intersection(group) and not _within(group, mine)}
    found = SavedState(
        tensors={names[name]: value for name, value in state.tensors.items()},
        parts={names[name]: part for name, part in state.parts.items()},
        scalars={names[name]: value for name, value in state.scalars.items()},
        options={names[n]: value for n, value in state.options.items() if n in names and names[n] not in mixed},
    )
    counted = next((name for name in sorted(mixed & mine) if found.scalars.get(name)), None)
    if counted is not None and any(hasattr(optimizer, name) for name in FLAT):
        raise PlanError(
            f"optimizer state of {counted}: its parameter group has parameters of another backbone too, and one count "
            "of steps for all; give each backbone a group of its own (module.backbone_parameters(name)), or load "
            "no optimizer state (load_optimizer_states=False)"
        )
    return found


def _within(group: Sequence[str], mine: set[str]) -> bool:
    return all(name in mine or is_placeholder(name) for name in group)


def weights_as_state(names: Mapping[Any, str], mine: set[str]) -> SavedState:
    """The full-precision copies of weights that were just loaded."""
    copies = {n: {MASTER: p.detach().float().reshape(-1)} for p, n in names.items() if n in mine}
    return SavedState(tensors=copies)


def load_layers(layers: Mapping[str, Any], content: Mapping[str, Any], *, strict: bool) -> None:
    """Give layers what their files, by path, hold."""
    with torch.no_grad():
        for path, layer in layers.items():
            layer.load_state_dict(content[path], strict=strict)
