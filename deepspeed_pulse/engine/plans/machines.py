"""The machines of a job with their links: kept ones, or measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed import comm as dist

from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.collectives import agree
from deepspeed_pulse.engine.device import HOST_BACKENDS
from deepspeed_pulse.engine.measure.hardware import agreed_hardware
from deepspeed_pulse.engine.measure.links import measure_cluster, shape_of, uneven
from deepspeed_pulse.engine.plans import kept
from deepspeed_pulse.engine.plans.content import MEASURING_VERSION, library_versions
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.buckets import BUCKET_BYTES
from deepspeed_pulse.ir.cluster import HCCL_BUFFER_MB, HCCL_MESSAGE_MB, Cluster, CommunicatorBytes, Link
from deepspeed_pulse.ir.fields import write_whole


def machines(device: torch.device, *, plan_cache: str | None = None) -> Cluster:
    """The machines that this job runs on; all ranks of the world call it.

    Links are kept in ``plan_cache`` for other hosts of the same kind, too. A ConfigError where ranks have different
    devices.
    """
    ranks = agreed_hardware(device, compared="memory_bytes")
    hosts = [rank.host for rank in ranks]
    nodes, per_node = shape_of(hosts)
    if dist.get_rank() == 0 and nodes > len(set(hosts)):
        print(f"pulse: {uneven(hosts)}", flush=True)
    if plan_cache is None:
        return measure_cluster(ranks, device, BUCKET_BYTES)
    # not by their names: a job that is queued again gets other hosts of the same cluster
    described = [nodes, per_node, len(set(hosts)), ranks[0].device, min(rank.memory_bytes for rank in ranks)]
    backend = str(torch.distributed.get_backend())
    measured_by = [MEASURING_VERSION, BUCKET_BYTES, *Link.__dataclass_fields__, *library_versions()]
    content = [described, backend, device.type, *measured_by, *_settings(device)]
    path = Path(plan_cache) / f"cluster-{kept.named_by(content)}.json"
    found = agree(lambda: kept.read_cluster(path, nodes, per_node), "reading kept links")
    if found is not None:
        return found
    cluster = measure_cluster(ranks, device, BUCKET_BYTES)
    agree(lambda: write_whole(path, cluster.to_json()), "keeping links")
    return cluster


def _settings(device: torch.device) -> list[str]:
    """What else times depend on: variables by which messages go another way, and on CPUs the threads on the cores."""
    prefixes = ("NCCL_", "HCCL_", "P2P_HCCL_", "GLOO_")
    found = {name: value for name, value in os.environ.items() if name.startswith(prefixes) and "DEBUG" not in name}
    if device.type == "cpu":
        found["threads"] = str(torch.get_num_threads())
    return sorted(f"{name}={value}" for name, value in found.items())


def with_communicators(cluster: Cluster, pulse: PulseConfig) -> Cluster:
    """The cluster with what communicators of this job's backend hold: on HCCL as it is told, with gloo nothing.

    Of NCCL no figure is known that would hold for other cards and versions: there it is the cluster file's, or nothing.
    """
    backend = str(torch.distributed.get_backend())
    if backend == "hccl":
        held = CommunicatorBytes.of_hccl(
            environment_mb=_megabytes("HCCL_BUFFSIZE", HCCL_BUFFER_MB, least=1),
            option_mb=pulse.hccl_buffer_size,
            message_mb=_megabytes("P2P_HCCL_BUFFSIZE", HCCL_MESSAGE_MB, least=0),
        )
        return replace(cluster, communicators=held)
    return replace(cluster, communicators=None) if backend in HOST_BACKENDS else cluster


def _megabytes(name: str, default: int, *, least: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(
            f"the environment variable {name}: expected an integer of at least {least}, MB, found {text!r}"
        )
    return int(text)
