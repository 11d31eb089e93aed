"""The long skips of a layer list, so that a traced list and that of a family can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepspeed_pulse.engine.specs import graph_of
from deepspeed_pulse.models.traced.code import SIZES

TOLD_BY_SHAPE = {SIZES, "patches", "frames"}
"""Values without content: their shapes tell later layers the batch's sizes."""


def long_skips(layers: Sequence[Any], at: Sequence[int]) -> list[tuple[int, int]]:
    """Ends of the values with content that one later layer reads, and not the next; ``at``: what each layer counts as.

    What the last layer alone reads counts as read by the one before it.
    """
    found = list[tuple[int, int]]()
    for value in graph_of(layers).values:
        if value.source is not None and value.name not in TOLD_BY_SHAPE:
            source, targets = at[value.source], {at[target] for target in value.targets}
            target = min(max(targets), max(at) - 1)
            if len(targets - {source}) == 1 and target > source + 1:
                found.append((source, target))
    return sorted(found)


def within(finer: Sequence[Any], layers: Sequence[Any]) -> list[int]:
    """The layer of a list that each layer of a finer one is a part of: the one that holds its weights."""
    holder = {key: number for number, layer in enumerate(layers) for key in layer.layer.state_dict()}
    held = [Counter(holder[key] for key in one.layer.state_dict()) for one in finer]
    return [count.most_common(1)[0][0] for count in held]
