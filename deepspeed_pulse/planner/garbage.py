"""How often Python looks for cycles of objects while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS = 10_000
"""Of objects that stay, between two collections; Python's own 700 cost a fifth of planning, which makes no cycles."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collections are rarer in the block, or in a function that is decorated with this. Off stays off."""
    young, *older = gc.get_threshold()
    if young:
        gc.set_threshold(max(young, _ALLOCATIONS), *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
