"""Measuring the links between ranks: messages to and fro between pairs, and what comes with many of them at a time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.engine.communicator import CONNECT_SECONDS, PipelineCommunicator
from deepspeed_pulse.engine.device import DeviceClock
from deepspeed_pulse.engine.measure.fitting import Points, fit_link
from deepspeed_pulse.engine.measure.hardware import Hardware
from deepspeed_pulse.engine.measure.overhead import message_pauses_ms
from deepspeed_pulse.engine.measure.sums import measure_bus
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.ir.cluster import MEASURED, Cluster, Link
from deepspeed_pulse.ir.program import Channel

SIZES = (2**12, 2**16, 2**20, 2**24, 2**26)
"""Message sizes in bytes: a time embedding, and hidden states up to those of video models."""

_LONGEST_MS = 40.0
"""A size that is expected to take longer is not tried: the bandwidth is known by then."""

_REPEATS = 5


def measure_cluster(ranks: Sequence[Hardware], device: torch.device, bucket_bytes: int) -> Cluster:
    """The machines that this job runs on, with measured links; all ranks of the world call it and get the same.

    Ranks on one host make a node. Neighbours inside a node, and ranks at the same place of neighbouring nodes, send
    each other messages of several sizes as a pipeline does, all pairs at once, as the pipelines of several replicas do,
    but no rank in two pairs at a time. The medians over the pairs are the links. What a message costs its ends is
    measured in pairs of ranks, all at work at once, all-reduces by all of a node and by all of a place in their nodes.

    ``ranks`` have the same device all; ``memory_bytes`` is the least that one has. Gradients are summed in buckets of
    ``bucket_bytes``.
    """
    nodes, per_node = shape_of([rank.host for rank in ranks])
    mine = [
        (inside, fit_link(points))
        for inside, pairs in rounds(nodes, per_node)
        for pair in pairs
        if dist.get_rank() in pair and (points := _exchange(pair, device))
    ]
    links = [link for told in told_by_all(mine) for link in told]
    pauses_ms = [ms for told in told_by_all(message_pauses_ms(device)) for ms in told]
    overhead_us = round(1e3 * statistics.median(pauses_ms), 3) if pauses_ms else 0.0
    bus = measure_bus(device, nodes, per_node, bucket_bytes)
    found = {
        kind: Link(
            bandwidth_gb_per_s=statistics.median(link.bandwidth_gb_per_s for inside, link in links if inside is kind),
            latency_us=statistics.median(link.latency_us for inside, link in links if inside is kind),
            overhead_us=overhead_us,
            bus_gb_per_s=bus_gb_per_s,
            bus_latency_us=bus_latency_us,
        )
        for kind, (bus_gb_per_s, bus_latency_us) in bus.items()
    }
    some = next(iter(found.values()))
    return Cluster(
        name=MEASURED,
        nodes=nodes,
        ranks_per_node=per_node,
        memory_bytes=min(rank.memory_bytes for rank in ranks),
        intra_node=found.get(True, some),
        inter_node=found.get(False, some),
    )


def shape_of(hosts: Sequence[str]) -> tuple[int, int]:
    """(nodes, ranks per node) of a job whose rank r is on ``hosts[r]``.

    Where hosts have unequal numbers of ranks, or ranks do not fill one after the other, every rank counts as a node: no
    link is taken for faster than it is.

    >>> shape_of(["a", "a", "b", "b"]), shape_of(["a", "a", "b"]), shape_of(["a", "b", "a", "b"])
    ((2, 2), (3, 1), (4, 1))
    """
    runs = [(host, len(list(group))) for host, group in itertools.groupby(hosts)]
    whole = len({host for host, _ in runs}) == len(runs) and len({length for _, length in runs}) == 1
    return (len(runs), runs[0][1]) if whole else (len(hosts), 1)


def uneven(hosts: Sequence[str]) -> str:
    """What is said where every rank counts as a node although a host holds several."""
    held = [f"{len(list(group))} on {host}" for host, group in itertools.groupby(hosts)]
    return (
        f"ranks do not fill hosts evenly, one host after the other ({', '.join(held[:8])}{', ...' * (len(held) > 8)}): "
        "planned as a rank a node, links inside hosts taken for as slow as those between them; start as many ranks on "
        'every host, or give a "cluster" file'
    )


def rounds(nodes: int, per_node: int) -> Iterator[tuple[bool, list[tuple[int, int]]]]:
    """(whether inside nodes, pairs of ranks that send at the same time); no rank is in two pairs of a round.

    >>> list(rounds(1, 3))
    [(True, [(0, 1)]), (True, [(1, 2)])]
    >>> list(rounds(3, 2))
    [(True, [(0, 1), (2, 3), (4, 5)]), (False, [(0, 2), (1, 3)]), (False, [(2, 4), (3, 5)])]
    """
    ranks = [range(n * per_node, (n + 1) * per_node) for n in range(nodes)]
    for first in (0, 1):
        pairs = [pair for node in ranks for pair in zip(node[first::2], node[first + 1 :: 2], strict=False)]
        if pairs:
            yield True, pairs
    for first in (0, 1):
        nodes_apart = zip(ranks[first::2], ranks[first + 1 :: 2], strict=False)
        pairs = [pair for one, next_one in nodes_apart for pair in zip(one, next_one, strict=True)]
        if pairs:
            yield False, pairs


def _exchange(pair: tuple[int, int], device: torch.device) -> Points:
    """Messages to and fro; the first of the pair gets the times, the other nothing.

    On an asynchronous device all of a size are given to it before anything is waited for, and the times are its own.
    """
    clock = DeviceClock(device)
    communicator = PipelineCommunicator(Seat.of_neighbours(dist.get_world_size(), device))
    there, back = Channel(*pair), Channel(pair[1], pair[0])
    communicator.share([there, back])
    first = dist.get_rank() == pair[0]

    def send(tensor: torch.Tensor) -> None:
        communicator.isend(tensor, there if first else back).wait(CONNECT_SECONDS)

    def receive(tensor: torch.Tensor) -> None:
        communicator.irecv(tensor, back if first else there).wait(CONNECT_SECONDS)

    points: Points = []
    for size in SIZES:
        go_on = torch.tensor([len(points) < 2 or fit_link(points).whole_ms(size) <= _LONGEST_MS], device=device)
        (send if first else receive)(go_on)
        if not bool(go_on):
            break
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        marks = [clock.mark()]
        for _ in range(_REPEATS + 1):
            for act in (send, receive) if first else (receive, send):
                act(message)
            marks.append(clock.mark())
        times = [end - start for start, end in itertools.pairwise(clock.times_ms(marks))]
        points.append((size, min(times[1:]) / 2))  # what made the others longer was not the link
    return points if first else []
