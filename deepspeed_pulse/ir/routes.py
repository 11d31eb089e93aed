"""Which sends a named value needs under given cuts and placement."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from deepspeed_pulse.ir.graph import NamedValue
from deepspeed_pulse.ir.plan import Route


def make_routes(boundaries: Sequence[int], placement: Sequence[int], values: Sequence[NamedValue]) -> tuple[Route, ...]:
    """One route a value; no hops where all its consumers share the producer's rank.

    A value travels from one visited rank to the next in stage order, beside the hidden state, and visits a rank at
    most once. Batch entries (no source) are read on every rank and have no route.
    """
    return tuple(_route(boundaries, placement, value) for value in values if value.source is not None)


def _route(boundaries: Sequence[int], placement: Sequence[int], value: NamedValue) -> Route:
    assert value.source is not None
    source = stage_of(boundaries, value.source)
    holder, holders = source, {placement[source]}
    hops: list[tuple[int, int]] = []
    for stage in sorted({stage_of(boundaries, target) for target in value.targets}):
        if placement[stage] not in holders:
            hops.append((holder, stage))
            holders.add(placement[stage])
            holder = stage
    return Route(name=value.name, source_stage=source, hops=tuple(hops))


def stage_of(boundaries: Sequence[int], layer: int) -> int:
    """Stage that holds a layer."""
    return bisect_right(boundaries, layer) - 1
