"""Clusters to simulate, and what was published of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.profile import adam_ms_per_gb

NODE = 8
"""Ranks of a node."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Samples a second of all ranks (PULSE, arXiv 2606.19163)."""

    pulse: float
    hanayo: float
    one_f_one_b: float
    zero_2: float

    def __str__(self) -> str:
        sides = (("Hanayo", self.hanayo), ("1F1B", self.one_f_one_b), ("ZeRO-2", self.zero_2))
        over = ", ".join(f"{name} {rate:g} ({self.pulse / rate:.2f})" for name, rate in sides)
        return f"PULSE {self.pulse:g}, {over}"


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Nodes of eight; GB/s of a rank's memory, of links inside and between. ``published``: by model and ranks."""

    name: str
    tflops: float
    memory_gb: int
    memory_gb_per_s: float
    inside: float
    between: float
    sizes: tuple[int, ...]
    published: dict[tuple[str, int], Published] = field(default_factory=dict)

    @property
    def optimizer_ms_per_gb(self) -> float:
        """By what passes through memory."""
        return adam_ms_per_gb("bfloat16", self.memory_gb_per_s)

    def cluster(self, ranks: int) -> Cluster:
        return Cluster(
            name=self.name,
            nodes=max(1, ranks // NODE),
            ranks_per_node=NODE,
            memory_bytes=self.memory_gb * 10**9,
            intra_node=Link(bandwidth_gb_per_s=self.inside, latency_us=10.0),
            inter_node=Link(bandwidth_gb_per_s=self.between, latency_us=20.0),
        )


V100 = Machines(
    name="V100, NVLink",
    tflops=37.0,
    memory_gb=32,
    memory_gb_per_s=900.0,
    inside=300.0,
    between=10.0,
    sizes=(8, 16, 64, 512),
    published={
        ("uvit", 16): Published(pulse=141.5, hanayo=62.8, one_f_one_b=79.7, zero_2=128.1),
        ("sdv2", 16): Published(pulse=274.6, hanayo=127.6, one_f_one_b=114.8, zero_2=245.5),
        ("hunyuan", 16): Published(pulse=13.8, hanayo=6.2, one_f_one_b=8.6, zero_2=11.9),
    },
)
ASCEND = Machines(
    name="Ascend 910A",
    tflops=16.0,
    memory_gb=32,
    memory_gb_per_s=1200.0,
    inside=30.0,
    between=19.0,
    sizes=(8, 64, 512),
    published={
        ("uvit", 64): Published(pulse=237.8, hanayo=72.0, one_f_one_b=82.7, zero_2=103.0),
        ("sdv2", 64): Published(pulse=159.1, hanayo=58.4, one_f_one_b=55.4, zero_2=141.5),
        ("hunyuan", 64): Published(pulse=5.4, hanayo=4.0, one_f_one_b=4.0, zero_2=3.5),
    },
)
H200 = Machines(
    name="H200",
    tflops=400.0,
    memory_gb=141,
    memory_gb_per_s=4800.0,
    inside=450.0,
    between=50.0,
    sizes=(8, 64, 512),
)
"""Operations a second of the first two: of U-ViT 2.7 B as published, 4.2 TFLOP a sample, over all ranks."""
