"""Clusters by name: ``a100:8x8`` is 8 nodes of 8 A100, so that a first plan needs no file written by hand."""

from __future__ import annotations

import re
from pathlib import Path

from deepspeed_pulse.errors import FileError, did_you_mean
from deepspeed_pulse.ir.cluster import Cluster, CommunicatorBytes, Link

INSIDE_US, BETWEEN_US = 10.0, 20.0
"""Latency of a message inside a node and between nodes, microseconds: a usual one, for names know no network."""

_SPELLING = re.compile(r"([a-z0-9]+):([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_NAME_ALONE = re.compile(r"[\w:-]+")


ACCELERATORS = {
    "v100": (32, 300.0, 10.0),
    "a100": (80, 300.0, 25.0),
    "h100": (80, 450.0, 50.0),
    "h200": (141, 450.0, 50.0),
    "910a": (32, 30.0, 19.0),
}
"""Memory in GB; GB/s of one rank to another, one way, inside a node and between nodes.

V100 and 910A as the PULSE paper (arXiv 2606.19163) states its clusters; the others: NVLink 3 and 4 one way, and a
network card of 200 and 400 Gbit/s for each accelerator.
"""

_ON_HCCL = ("910a",)

SPELLINGS = f"a cluster file, or NAME:NODESxRANKS with a name of {', '.join(ACCELERATORS)}, for example a100:1x8"


def load_cluster(text: str) -> Cluster:
    """The cluster of a file, or the one that ``text`` names.

    Raises FileError when there is no such file, it is damaged, or the name is not known.
    """
    found = _SPELLING.fullmatch(text.lower())
    if found is None and _NAME_ALONE.fullmatch(text) and not Path(text).exists():
        raise FileError(f"{text}: no such file; expected {SPELLINGS}")
    if found is None or Path(text).exists():
        return Cluster.load(text)
    name, nodes, ranks = found.groups()
    if name not in ACCELERATORS:
        raise FileError(
            f"{text}: no such file, and no such accelerator{did_you_mean(name, ACCELERATORS)}; expected {SPELLINGS}"
        )
    memory_gb, inside, between = ACCELERATORS[name]
    return Cluster(
        name=text.lower(),
        nodes=int(nodes),
        ranks_per_node=int(ranks),
        memory_bytes=memory_gb * 10**9,
        intra_node=Link(bandwidth_gb_per_s=inside, latency_us=INSIDE_US),
        inter_node=Link(bandwidth_gb_per_s=between, latency_us=BETWEEN_US),
        communicators=CommunicatorBytes.of_hccl() if name in _ON_HCCL else None,
    )
