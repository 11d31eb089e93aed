"""Measuring all-reduces: what a link carries while all ranks of a ring send, receive and add at the same time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.engine.device import DeviceClock
from deepspeed_pulse.engine.measure.fitting import Points, fit_link

_SIZES = (2**16, 2**20, 2**22, 2**24, 2**26)
"""Of what is summed, bytes."""

_LONGEST_MS = 100.0
"""A size that is expected to take longer is not tried: the bandwidth is known by then."""

_FEWEST = 3
"""Sizes that are tried whatever they take: the two smallest tell of starting more than of bandwidth. Where ranks share
cores six times too little of it came out."""

_PARTED, _PARTS = 2**20, 16
"""Bytes that are summed at once and in so many buckets."""

_REPEATS = 3


def measure_bus(device: torch.device, nodes: int, per_node: int, bucket_bytes: int) -> dict[bool, tuple[float, float]]:
    """Of all-reduces inside nodes (True) and between nodes (False); all ranks of the world call it.

    Bus bandwidth in GB/s, and in microseconds what each round of one more bucket takes beside its bytes.

    A ring of g ranks carries 2 (g - 1) / g times what is summed over each of its links. Groups of a kind sum at the
    same time, as the replicas of all pipeline ranks do; their median counts. A kind without a group is left out.
    """
    found = {}
    for inside, groups in rings(nodes, per_node):
        everybody = [*range(dist.get_world_size())]
        made = [(None if ranks == everybody else dist.new_group(ranks), ranks) for ranks in groups]
        ((group, ranks),) = (one for one in made if dist.get_rank() in one[1])
        link = fit_link(_points(group, len(ranks), device, bucket_bytes))
        round_us = 1e3 * _bucket_ms(group, device) / (2 * (len(ranks) - 1))
        of_all = told_by_all((link.bandwidth_gb_per_s, round(round_us, 3)))
        gb_per_s, latency_us = map(statistics.median, zip(*of_all, strict=True))
        found[inside] = gb_per_s, latency_us
    return found


def rings(nodes: int, per_node: int) -> Iterator[tuple[bool, list[list[int]]]]:
    """(whether inside nodes, ranks that sum with each other); every rank is in one group of a kind.

    >>> list(rings(2, 2))
    [(True, [[0, 1], [2, 3]]), (False, [[0, 2], [1, 3]])]
    >>> list(rings(1, 3))
    [(True, [[0, 1, 2]])]
    """
    if per_node > 1:
        yield True, [[n * per_node + i for i in range(per_node)] for n in range(nodes)]
    if nodes > 1:
        yield False, [[n * per_node + i for n in range(nodes)] for i in range(per_node)]


def _points(group: Any, size: int, device: torch.device, bucket_bytes: int) -> Points:
    """(bytes over a link, ms), the same on every rank of the group: the slowest rank's."""
    points: Points = []
    for num_bytes in _SIZES:
        carried = 2 * (size - 1) * num_bytes // size
        if len(points) >= _FEWEST and fit_link(points).whole_ms(carried) > _LONGEST_MS:
            break
        points.append((carried, _sum_ms(num_bytes, bucket_bytes, group, device)))
    return points


def _bucket_ms(group: Any, device: torch.device) -> float:
    """What the same bytes in many small buckets take more than in one, for each: these are under way together."""
    whole, many = (_sum_ms(_PARTED, size, group, device) for size in (_PARTED, _PARTED // _PARTS))
    return max(0.0, many - whole) / (_PARTS - 1)


def _sum_ms(num_bytes: int, bucket_bytes: int, group: Any, device: torch.device) -> float:
    """The same on every rank of the group: the slowest rank's usual time."""
    clock = DeviceClock(device)
    summed = torch.zeros(num_bytes // 4, device=device)
    marks = [clock.mark()]
    for _ in range(_REPEATS + 1):
        _sum(summed, group, bucket_bytes)
        marks.append(clock.mark())
    times = [end - start for start, end in itertools.pairwise(clock.times_ms(marks))]
    slowest = torch.tensor(statistics.median(times[1:]), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _sum(summed: torch.Tensor, group: Any, bucket_bytes: int) -> None:
    """As gradients are reduced: gathered into buckets, all of them under way together, and put back."""
    buckets = [(part, part.clone()) for part in summed.split(bucket_bytes // summed.element_size())]
    under_way = [dist.all_reduce(bucket, group=group, async_op=True) for _, bucket in buckets]
    for (part, bucket), work in zip(buckets, under_way, strict=True):
        work.wait()
        part.copy_(bucket)
