"""Several backbones in one layer list: which layers, and of a plan which stages, are whose.

Layers of a backbone follow one another, and no value passes between two of them. Names of values are each backbone's
own, so in one list they have the backbone's name before them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from deepspeed_pulse.ir.codec import Form
from deepspeed_pulse.ir.fields import Fields

Range = tuple[int, int]
"""The first, and the one behind the last."""


@dataclass(frozen=True, kw_only=True)
class BackboneLayers:
    """Layers of a list that are one backbone's."""

    name: str
    layers: Annotated[Range, Form(expected="[first layer, end]")]


@dataclass(frozen=True, kw_only=True)
class BackboneStages:
    """Stages of a plan that are one backbone's.

    ``carried``: per rank, how many of its actions, the first of them, are the previous step's; left out where none are.
    """

    name: str
    stages: Annotated[Range, Form(expected="[first stage, end]")]
    carried: Annotated[tuple[int, ...], Form(left_out=True)] = ()


def check_parts(fields: Fields, key: str, ranges: Sequence[Range], names: Sequence[str], count: int) -> None:
    """Backbones in a file: at least two, of different names, that follow one another and leave nothing out."""
    if not ranges:
        return
    whole = ranges[0][0] == 0 and ranges[-1][1] == count and all(a < b for a, b in ranges)
    if not whole or any(a[1] != b[0] for a, b in itertools.pairwise(ranges)):
        raise fields.error(key, f"backbones that follow one another from 0 to {count}")
    if len(ranges) < 2 or len(set(names)) < len(names):
        raise fields.error(key, "at least two backbones of different names; with one, leave it out")


def value_name(backbone: str | None, name: str) -> str:
    """A value's name in the list of all layers; ``backbone`` None: there is one backbone."""
    return name if backbone is None else f"{backbone}.{name}"
