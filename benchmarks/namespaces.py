"""Network namespaces joined by links of limited speed: real ranks on real slow networks on one machine.

Every pair of namespaces has a link of its own, limited in each direction by a token bucket (tc's tbf), so that a
directed pair of ranks has the bandwidth that a cluster file says. Needs root and iproute2; nothing is left behind.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "home"
"""Holds a namespace's address, whichever link a packet takes."""

BURST_BYTES = 32 * 1024
"""What a link that was idle lets through at once: small beside a message, so that it does not count."""

TBF_SHARE = 0.96
"""Of a link's rate, what is left for a message: headers take the rest."""

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Namespace:
    name: str
    address: str
    interface: str = INTERFACE


@contextmanager
def namespaces(count: int, mbit: Callable[[int, int], float | None]) -> Iterator[Sequence[Namespace]]:
    """So many namespaces, all joined.

    Args:
        mbit: rate from one namespace to another; None for no limit. Asked for each direction.
    """
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run this benchmark as root")
    made = [Namespace(name=f"pulse{os.getpid()}r{i}", address=f"10.91.7.{i + 1}") for i in range(count)]
    try:
        for space in made:
            _ip(f"netns add {space.name}")
            _ip("link set lo up", f"link add {INTERFACE} type bridge", within=space)
            _ip(f"addr add {space.address}/32 dev {INTERFACE}", f"link set {INTERFACE} up", within=space)
        for (i, a), (j, b) in itertools.combinations(enumerate(made), 2):
            _ip(f"link add to{j} type veth peer name to{i} netns {b.name}", within=a)
            _connect(a, b, f"to{j}", mbit(i, j))
            _connect(b, a, f"to{i}", mbit(j, i))
        yield made
    finally:
        for space in made:  # links go with their ends
            subprocess.run(["ip", "netns", "del", space.name], capture_output=True, timeout=30, check=False)


def enter(space: Namespace) -> None:
    """Move this process into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space.name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space.name}")


def _connect(source: Namespace, target: Namespace, device: str, mbit: float | None) -> None:
    route = f"route add {target.address}/32 dev {device} src {source.address}"
    _ip(f"link set {device} up", route, within=source)
    if mbit is not None:
        limit = f"tbf rate {round(mbit * 1e3)}kbit burst {BURST_BYTES} latency 200ms"
        _run(["tc", "-n", source.name, *f"qdisc add dev {device} root {limit}".split()])


def _ip(*commands: str, within: Namespace | None = None) -> None:
    place = ["-n", within.name] if within else []
    _run(["ip", *place, "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: list[str], given: str = "") -> None:
    try:
        subprocess.run(command, input=given, text=True, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not there: install iproute2") from None
    except subprocess.CalledProcessError as problem:
        raise SystemExit(f"{' '.join(command)}: {given.strip()}: {problem.stderr.strip()}") from None
