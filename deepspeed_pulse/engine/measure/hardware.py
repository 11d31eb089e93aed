"""What each rank runs on: one profile and one kind of link stand for all of them, so they have to be alike."""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.errors import ConfigError, first_of

NO_LIMIT_BYTES = 2**50
"""Memory of a rank whose device does not say how much it has: the host's is shared and paged."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A rank's host and device; ``threads`` compute on a CPU, ``memory_bytes`` are the device's.

    ``boot`` tells hosts of one name apart; empty where the system has no such thing.
    """

    host: str
    boot: str
    device: str
    memory_bytes: int
    threads: int


def device_name(device: torch.device) -> str:
    """The model of an accelerator or a processor, as far as the system tells.

    >>> device_name(torch.device("cpu")).startswith("cpu (")
    True
    """
    if device.type != "cpu":
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        return str(named(device) if callable(named) else get_accelerator().device_name())
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"cpu ({models[0] if models else platform.processor() or platform.machine()})"


def boot() -> str:
    """What differs between two machines, and between two starts of one; empty where it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def told_apart(found: Sequence[Hardware]) -> tuple[Hardware, ...]:
    """The same, with a number behind the name of a host that has another one's: copies of a virtual machine have.

    >>> ranks = [Hardware(host="a", boot=b, device="x", memory_bytes=1, threads=1) for b in ("1", "1", "2")]
    >>> [rank.host for rank in told_apart(ranks)]
    ['a', 'a', 'a (2)']
    """
    boots: dict[str, list[str]] = {}
    for rank in found:
        if rank.boot not in boots.setdefault(rank.host, []):
            boots[rank.host].append(rank.boot)
    places = [boots[rank.host].index(rank.boot) + 1 for rank in found]
    return tuple(
        replace(rank, host=f"{rank.host} ({place})") if place > 1 else rank
        for rank, place in zip(found, places, strict=True)
    )


def hardware_of(device: torch.device) -> Hardware:
    """This rank's."""
    on_cpu = device.type == "cpu"
    return Hardware(
        host=socket.gethostname(),
        boot=boot(),
        device=device_name(device),
        memory_bytes=NO_LIMIT_BYTES if on_cpu else int(get_accelerator().total_memory(device.index)),
        threads=torch.get_num_threads() if on_cpu else 0,
    )


def agreed_hardware(device: torch.device, *, compared: Literal["threads", "memory_bytes"]) -> tuple[Hardware, ...]:
    """Every rank's, in order; all ranks of the world call it. Rank 0 says so when ranks differ in what is ``compared``.

    Where devices differ, every rank raises the same ConfigError.
    """
    found = told_apart(told_by_all(hardware_of(device)))
    if len({rank.device for rank in found}) > 1:
        raise ConfigError(
            "expected the same device on every rank, to measure layers and links, found "
            f"{_who_has(found, 'device')}; run on equal devices, or give files made on the slowest of them: "
            '"profile" (ds_pulse profile) and "cluster" in the "pulse" block'
        )
    if dist.get_rank() == 0 and len({getattr(rank, compared) for rank in found}) > 1:
        effect = "the slowest sets the pace" if compared == "threads" else "each is planned for with the least"
        print(f"pulse: ranks differ in {compared}: {_who_has(found, compared)}; {effect}", flush=True)
    return found


def _who_has(found: Sequence[Hardware], what: str) -> str:
    """
    >>> pair = [Hardware(host="a", boot="", device="x", memory_bytes=1, threads=n) for n in (1, 1, 2)]
    >>> _who_has(pair, "threads")
    '1 on ranks 0, 1 (host a), 2 on rank 2 (host a)'
    """
    parts = []
    for value in dict.fromkeys(getattr(rank, what) for rank in found):
        ranks = [index for index, rank in enumerate(found) if getattr(rank, what) == value]
        hosts = list(dict.fromkeys(found[index].host for index in ranks))
        where = f"host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}"
        parts.append(f"{value} on rank{'s' if len(ranks) > 1 else ''} {first_of(ranks, 8)} ({where})")
    return ", ".join(parts)
