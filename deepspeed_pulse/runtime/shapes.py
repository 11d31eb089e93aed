"""What ranks know about batches of one shape, so that a shape seen before costs nothing to run again.

Everything that travels between stages follows from the shapes of the batch. So each microbatch has a
*key*, a number that stands for its batch's shapes and is the same on every rank of the pipeline, and
what boundaries agreed on is kept by key. With shapes that never change there is one key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepspeed_pulse.runtime.payload import Signature

Edge = tuple[str, int, int, bool]
"""A boundary: name and stages (from, to) in forward direction, and whether extra forwards cross it."""

MAX_KEYS = 1024
"""Shapes remembered at a time; all ranks see the same keys in the same order, so they forget alike."""


@dataclass
class Shapes:
    """Batches of one shape: what each boundary carries; in bytes what a stage keeps from its forward to its backward.

    ``activation_bytes``: by stage and whether its backward runs in halves. ``unkept_bytes``: of a stage's output, what
    its backward does not need. ``late_bytes``: gradients that the first half of its backward keeps for the second.
    """

    signatures: dict[Edge, Signature] = field(default_factory=dict)
    activation_bytes: dict[tuple[int, bool], int] = field(default_factory=dict)
    unkept_bytes: dict[int, int] = field(default_factory=dict)
    late_bytes: dict[int, int] = field(default_factory=dict)


class ShapeBook:
    """Shapes met so far, by mode and key (training and evaluation differ in what wants a gradient)."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._found: OrderedDict[tuple[str, int], Shapes] = OrderedDict()

    def of(self, mode: str, keys: Sequence[int]) -> list[Shapes]:
        """The entry of each key, in order; those not used for longest are forgotten."""
        found = []
        for key in keys:
            found.append(self._found.setdefault((mode, key), Shapes()))
            self._found.move_to_end((mode, key))
        while len(self._found) > self._max_keys:
            self._found.popitem(last=False)
        return found
