"""Buckets of gradients: when each of a stage's leaves, how long its sum takes, how large they should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepspeed_pulse.ir.buckets import BUCKET_BYTES, is_full
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.planner.cost import StageCosts
from deepspeed_pulse.planner.links import Links

_WORTH = 0.005
"""Of a step, what smaller buckets have to save: each keeps the host for a time that no plan counts."""


class Bucket(NamedTuple):
    """``share``: of the time of the stage's last backward, after which it is whole. ``ms``: its sum takes so long."""

    share: float
    ms: float


def in_buckets(
    costs: StageCosts, links: Links, placement: Placement, bucket_bytes: int
) -> tuple[tuple[Bucket, ...], ...]:
    """Of each stage's gradients, first to last, as the engine gathers them.

    A layer is taken for one parameter: what of it is whole before its backward ends leaves no earlier here.
    """
    return tuple(
        tuple(Bucket(share, links.reduction_ms(rank, size)) for share, size in _gathered(whole, bucket_bytes))
        for rank, whole in zip(placement, costs.whole, strict=True)
    )


def _gathered(whole: Sequence[tuple[float, int]], bucket_bytes: int) -> Iterator[tuple[float, int]]:
    size, left = 0, sum(num_bytes for _, num_bytes in whole)
    for share, num_bytes in whole:
        size, left = size + num_bytes, left - num_bytes
        if not left or is_full(size, left, bucket_bytes):
            yield share, size
            size = 0


def behind_ms(buckets: Sequence[Bucket], backward_ms: float) -> float:
    """What is left to sum when a stage's last backward, so long, ends, if nothing else keeps the link."""
    end = -math.inf
    for share, ms in buckets:
        end = max(end, (share - 1.0) * backward_ms) + ms
    return end


def fitting_bucket_bytes(costs: StageCosts, links: Links, placement: Placement, microbatches: int) -> int:
    """The largest buckets of all stages with which sums end about as early as with any.

    On slow links the first one should leave soon; each has latencies of its own.
    """
    work = sum(costs.forward_ms) + sum(costs.backward_ms)
    worth_ms = _WORTH * microbatches * work / placement.num_ranks
    smallest = min((size for whole in costs.whole for _, size in whole), default=BUCKET_BYTES)
    size, tried = BUCKET_BYTES, dict[int, float]()
    while True:
        stages = zip(in_buckets(costs, links, placement, size), costs.backward_ms, strict=True)
        tried[size] = max(behind_ms(buckets, ms) for buckets, ms in stages)
        if size <= smallest or tried[BUCKET_BYTES] <= worth_ms:  # else each layer is a bucket; or nothing is to gain
            break
        size //= 2
    least = min(tried.values())
    return next(size for size, ms in tried.items() if ms <= least + worth_ms)
