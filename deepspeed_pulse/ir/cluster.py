"""The machines: link speeds and memory (file format ``pulse-cluster/1``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from deepspeed_pulse.ir.codec import Count, File, Form
from deepspeed_pulse.ir.fields import Fields

MIN_BANDWIDTH_GB_PER_S = 1e-9

MEASURED = "measured"
"""Name of a cluster whose links were measured by the job that runs on it."""

HCCL_BUFFER_MB, HCCL_MESSAGE_MB = 200, 20
"""Of a communicator, each way: HCCL's own size, and torch-npu's for messages between two ranks (since 7.1.0)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed pair of ranks: GB (1e9 bytes) per second and microseconds.

    ``overhead_us``: how long each message keeps its sender, and its receiver, from other work: o of the LogP model
    (Culler et al., 1993). 0 where a device works on while the host sends. ``bus_gb_per_s``: what the link carries in
    a ring all-reduce, all ranks sending, receiving and adding (bus bandwidth in nccl-tests); ``bus_latency_us``: what
    each of its 2 (g - 1) rounds over g ranks takes beside the bytes, other sums under way; None: as in a message.
    ``one_port``: all that a rank sends over such links leaves one after the other, whoever it is for, sums of gradients
    included, as from one network card (the one-port model; Bhat, Raghavendra and Prasanna, 2003); else each pair of
    ranks has a link of its own, and sums of gradients another.
    """

    bandwidth_gb_per_s: Annotated[float, Form(above=0.0)]
    latency_us: float
    overhead_us: Annotated[float, Form(left_out=True)] = 0.0
    bus_gb_per_s: Annotated[float | None, Form(above=0.0, left_out=True)] = None
    bus_latency_us: Annotated[float | None, Form(left_out=True)] = None
    one_port: Annotated[bool, Form(left_out=True)] = False

    def transfer_ms(self, num_bytes: int) -> float:
        """Time the bytes occupy the link, latency excluded."""
        return num_bytes / (self.bandwidth_gb_per_s * 1e6)

    def bus_ms(self, num_bytes: int) -> float:
        """Time the bytes of an all-reduce occupy the link, latency excluded."""
        return num_bytes / ((self.bus_gb_per_s or self.bandwidth_gb_per_s) * 1e6)

    @property
    def bus_latency_ms(self) -> float:
        """Of one round of an all-reduce."""
        return (self.latency_us if self.bus_latency_us is None else self.bus_latency_us) / 1e3

    def whole_ms(self, num_bytes: int) -> float:
        """From the start of a message until it is there."""
        return self.transfer_ms(num_bytes) + self.latency_ms

    @property
    def latency_ms(self) -> float:
        return self.latency_us / 1e3

    @property
    def overhead_ms(self) -> float:
        return self.overhead_us / 1e3

    def check_form(self, fields: Fields) -> None:
        for name, speed in (("bandwidth_gb_per_s", self.bandwidth_gb_per_s), ("bus_gb_per_s", self.bus_gb_per_s)):
            if speed is not None and speed < MIN_BANDWIDTH_GB_PER_S:
                raise fields.error(name, f"at least {MIN_BANDWIDTH_GB_PER_S:g}, a byte a second")


@dataclass(frozen=True, kw_only=True)
class CommunicatorBytes:
    """What a communicator holds on a rank's device, by what it is for (``ir/communicators.py``)."""

    world_bytes: int = 0
    group_bytes: int = 0
    pair_bytes: int = 0
    channel_bytes: int = 0

    @classmethod
    def of_hccl(
        cls, *, environment_mb: int = HCCL_BUFFER_MB, option_mb: int | None = None, message_mb: int = HCCL_MESSAGE_MB
    ) -> CommunicatorBytes:
        """HCCL keeps a buffer for what it sends and one for what it receives, of so many MB (2**20 bytes) each.

        Args:
            environment_mb: ``HCCL_BUFFSIZE``.
            option_mb: ``"hccl_buffer_size"``, which goes before it in all groups but the world's.
            message_mb: ``P2P_HCCL_BUFFSIZE``; 0: messages run in their group's communicator.
        """
        group_mb = environment_mb if option_mb is None else option_mb
        sizes = (environment_mb, group_mb, message_mb, message_mb or group_mb)
        return cls(**dict(zip(cls.__dataclass_fields__, (2 * mb * 2**20 for mb in sizes), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Cluster(File):
    """``nodes`` x ``ranks_per_node`` ranks; global ranks fill nodes in order.

    ``communicators``: None: not known, and not counted.
    """

    FORMATS = ("pulse-cluster/1",)
    WHAT = "cluster"

    name: str
    nodes: Count
    ranks_per_node: Count
    memory_bytes: Count
    intra_node: Link
    inter_node: Link
    communicators: Annotated[CommunicatorBytes | None, Form(left_out=True)] = None

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def link(self, source: int, target: int) -> Link:
        """The link between two global ranks."""
        return self.intra_node if self.node_of(source) == self.node_of(target) else self.inter_node

    def node_of(self, rank: int) -> int:
        """Node of a global rank."""
        return rank // self.ranks_per_node
