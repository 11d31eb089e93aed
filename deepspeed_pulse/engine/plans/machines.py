"""The machines of a job with their links: kept ones, or measured."""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed import comm as dist

from deepspeed_pulse.engine.collectives import agree
from deepspeed_pulse.engine.gradients.reduction import BUCKET_BYTES
from deepspeed_pulse.engine.measure.hardware import agreed_hardware
from deepspeed_pulse.engine.measure.links import measure_cluster, shape_of, uneven
from deepspeed_pulse.engine.plans import kept
from deepspeed_pulse.engine.plans.content import library_versions
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.fields import write_whole


def machines(device: torch.device, *, plan_cache: str | None = None) -> Cluster:
    """The machines that this job runs on; all ranks of the world call it. Links are kept by content in ``plan_cache``.

    A ConfigError where ranks have different devices.
    """
    ranks = agreed_hardware(device, compared="memory_bytes")
    hosts = [rank.host for rank in ranks]
    nodes, per_node = shape_of(hosts)
    if dist.get_rank() == 0 and nodes > len(set(hosts)):
        print(f"pulse: {uneven(hosts)}", flush=True)
    if plan_cache is None:
        return measure_cluster(ranks, device, BUCKET_BYTES)
    described = [[rank.host, rank.device, rank.memory_bytes] for rank in ranks]
    backend = str(torch.distributed.get_backend())
    content = [described, backend, device.type, *Link.__dataclass_fields__, *library_versions()]
    path = Path(plan_cache) / f"cluster-{kept.named_by(content)}.json"
    found = agree(lambda: kept.read_cluster(path, nodes, per_node), "reading kept links")
    if found is not None:
        return found
    cluster = measure_cluster(ranks, device, BUCKET_BYTES)
    agree(lambda: write_whole(path, cluster.to_json()), "keeping links")
    return cluster
