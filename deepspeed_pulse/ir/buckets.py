"""Gradients that are summed over replicas together: when there are enough of them."""

from __future__ import annotations

BUCKET_BYTES = 2**24
"""Of a full bucket, unless a plan says less. Gradients of this size are summed in place; smaller ones are gathered up
to it, so that latency does not count. Each sum wakes threads on every rank: a quarter of this size costs two ranks with
a core each 2 % of a step of 0.3 s."""

_LAST = 32
"""A stage's last buckets are no smaller than such a part of a full one, where as much is left."""


def is_full(num_bytes: int, left_bytes: int, bucket_bytes: int) -> bool:
    """Whether a bucket leaves with what it has; so much of its stage is left.

    It is full once it is as large as what comes behind it: no backward runs beside the sum of a stage's last one.

    >>> [is_full(size, 2**20, 2**24) for size in (2**19, 2**20)]
    [False, True]
    """
    return num_bytes >= min(bucket_bytes, max(bucket_bytes // _LAST, left_bytes))
