"""The machines: link speeds and memory (file format ``pulse-cluster/1``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_pulse.ir.fields import Fields, read_file, read_json, write_json

FORMAT = "pulse-cluster/1"
MIN_BANDWIDTH_GB_PER_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed pair of ranks: GB (1e9 bytes) per second and microseconds.

    ``overhead_us``: how long each message keeps its sender, and its receiver, from other work: o of the LogP model
    (Culler et al., 1993). 0 where a device works on while the host sends. ``bus_gb_per_s``: what the link carries in
    a ring all-reduce, all ranks sending, receiving and adding (bus bandwidth in nccl-tests); None: as in a message.
    ``one_port``: all that a rank sends over such links leaves one after the other, whoever it is for, sums of gradients
    included, as from one network card (the one-port model; Bhat, Raghavendra and Prasanna, 2003); else each pair of
    ranks has a link of its own, and sums of gradients another.
    """

    bandwidth_gb_per_s: float
    latency_us: float
    overhead_us: float = 0.0
    bus_gb_per_s: float | None = None
    one_port: bool = False

    def transfer_ms(self, num_bytes: int) -> float:
        """Time the bytes occupy the link, latency excluded."""
        return num_bytes / (self.bandwidth_gb_per_s * 1e6)

    def bus_ms(self, num_bytes: int) -> float:
        """Time the bytes of an all-reduce occupy the link, latency excluded."""
        return num_bytes / ((self.bus_gb_per_s or self.bandwidth_gb_per_s) * 1e6)

    def whole_ms(self, num_bytes: int) -> float:
        """From the start of a message until it is there."""
        return self.transfer_ms(num_bytes) + self.latency_ms

    @property
    def latency_ms(self) -> float:
        return self.latency_us / 1e3

    @property
    def overhead_ms(self) -> float:
        return self.overhead_us / 1e3


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``nodes`` x ``ranks_per_node`` ranks; global ranks fill nodes in order."""

    name: str
    nodes: int
    ranks_per_node: int
    memory_bytes: int
    intra_node: Link
    inter_node: Link

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def link(self, source: int, target: int) -> Link:
        """The link between two global ranks."""
        return self.intra_node if self.node_of(source) == self.node_of(target) else self.inter_node

    def node_of(self, rank: int) -> int:
        """Node of a global rank."""
        return rank // self.ranks_per_node

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "memory_bytes": self.memory_bytes,
            "intra_node": _link_dict(self.intra_node),
            "inter_node": _link_dict(self.inter_node),
        }

    def to_json(self) -> str:
        return write_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str, where: str = "cluster") -> Cluster:
        """Read a cluster; a ``FileError`` names ``where`` and the field that is wrong."""
        fields = read_json(text, where, FORMAT)
        fields.done(("format", "name", "nodes", "ranks_per_node", "memory_bytes", "intra_node", "inter_node"))
        return cls(
            name=fields.text("name"),
            nodes=fields.integer("nodes", minimum=1),
            ranks_per_node=fields.integer("ranks_per_node", minimum=1),
            memory_bytes=fields.integer("memory_bytes", minimum=1),
            intra_node=_read_link(fields.object("intra_node")),
            inter_node=_read_link(fields.object("inter_node")),
        )

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        return cls.from_json(read_file(path), str(path))


def _link_dict(link: Link) -> dict[str, float]:
    data: dict[str, float] = {"bandwidth_gb_per_s": link.bandwidth_gb_per_s, "latency_us": link.latency_us}
    if link.overhead_us:
        data["overhead_us"] = link.overhead_us
    if link.bus_gb_per_s is not None:
        data["bus_gb_per_s"] = link.bus_gb_per_s
    if link.one_port:
        data["one_port"] = True
    return data


def _read_link(fields: Fields) -> Link:
    fields.done(Link.__dataclass_fields__)
    return Link(
        bandwidth_gb_per_s=_read_speed(fields, "bandwidth_gb_per_s"),
        latency_us=fields.number("latency_us"),
        overhead_us=fields.number("overhead_us") if fields.has("overhead_us") else 0.0,
        bus_gb_per_s=_read_speed(fields, "bus_gb_per_s") if fields.has("bus_gb_per_s") else None,
        one_port=fields.flag("one_port", False),
    )


def _read_speed(fields: Fields, name: str) -> float:
    speed = fields.number(name, above=0.0)
    if speed < MIN_BANDWIDTH_GB_PER_S:
        raise fields.error(name, f"at least {MIN_BANDWIDTH_GB_PER_S:g}, a byte a second")
    return speed
