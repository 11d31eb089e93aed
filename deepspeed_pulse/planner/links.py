"""The links between a job's ranks, and every rule of sending over them.

A message leaves when its sender is done and what it leaves through is free, occupies that for bytes/bandwidth, and
arrives a latency later.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.layout import Grid

Port = tuple[int, int]
"""A pipeline rank, and the rank its messages are for; or below 0 the card through which all of its messages leave."""


class Way(NamedTuple):
    """How something goes from one pipeline rank to another: ``port`` is taken for ``transfer_ms``, then it is there
    ``latency_ms`` later."""

    source: int
    target: int
    num_bytes: int
    port: Port
    transfer_ms: float
    latency_ms: float


class Links:
    """Links between the pipeline ranks of a grid on a cluster."""

    def __init__(self, cluster: Cluster, grid: Grid) -> None:
        self._cluster, self._grid = cluster, grid
        self._ways: dict[tuple[int, int], Link] = {}
        self._ports: dict[tuple[int, int], Port] = {}

    def between(self, source: int, target: int) -> Link:
        """From one pipeline rank to another: it leaves the node if it does so in any of the data-parallel pipelines.

        They take their steps together, so the slowest of them counts.
        """
        found = self._ways.get((source, target))
        if found is None:
            grid, node_of = self._grid, self._cluster.node_of
            local = all(
                node_of(grid.global_rank(source, index)) == node_of(grid.global_rank(target, index))
                for index in range(grid.data_parallel)
            )
            found = self._cluster.intra_node if local else self._cluster.inter_node
            self._ways[source, target] = found
        return found

    def way(self, source: int, target: int, num_bytes: int) -> Way:
        """How so many bytes go from one pipeline rank to another."""
        link = self.between(source, target)
        port = self.port(source, target)
        return Way(source, target, num_bytes, port, link.transfer_ms(num_bytes), link.latency_ms)

    def of_peers(self, rank: int) -> Link:
        """Of the ring of a pipeline rank's data-parallel peers, in the order of their global ranks: first to last.

        It leaves the node exactly when any link of the ring does.
        """
        grid = self._grid
        return self._cluster.link(grid.global_rank(rank, 0), grid.global_rank(rank, grid.data_parallel - 1))

    def port(self, source: int, target: int) -> Port:
        """What messages between two pipeline ranks leave through, one after the other."""
        found = self._ports.get((source, target))
        if found is None:
            found = self._ports[source, target] = self._port(self.between(source, target), source, target)
        return found

    def sums_port(self, rank: int) -> Port:
        """What a pipeline rank's gradients leave through to its data-parallel peers."""
        return self._port(self.of_peers(rank), rank, rank)

    def _port(self, way: Link, source: int, target: int) -> Port:
        """Links alike within and between nodes are one card."""
        if not way.one_port:
            return source, target
        return source, -1 if way == self._cluster.inter_node else -2

    def reduction_ms(self, rank: int, num_bytes: int) -> float:
        """Ring all-reduce of a pipeline rank's gradients over its data-parallel peers."""
        group = self._grid.data_parallel
        if group == 1 or not num_bytes:
            return 0.0
        link = self.of_peers(rank)
        return 2 * (group - 1) * (link.bus_ms(num_bytes) / group + link.bus_latency_ms)

    def least_reduction_ms(self, rank: int, num_bytes: int) -> float:
        """The same without latencies, of which there are as many as there are all-reduces."""
        group = self._grid.data_parallel
        return 2 * (group - 1) / group * self.of_peers(rank).bus_ms(num_bytes)


class Ports:
    """When each port is free; what leaves through one goes one after the other."""

    def __init__(self) -> None:
        self._free_ms: dict[Port, float] = defaultdict(float)

    def send(self, way: Way, ready_ms: float) -> tuple[float, float]:
        """When what is ready leaves and when it arrives."""
        leave, over = self.occupy(way.port, ready_ms, way.transfer_ms)
        return leave, over + way.latency_ms

    def occupy(self, port: Port, ready_ms: float, ms: float) -> tuple[float, float]:
        """From when until when something that is ready takes a port."""
        start = max(ready_ms, self._free_ms[port])
        end = self._free_ms[port] = start + ms
        return start, end
