"""Network namespaces joined by links of limited speed: real ranks on real slow networks on one machine.

``namespaces`` gives every pair a link of its own, limited in each direction by a token bucket (tc's tbf), so that a
directed pair of ranks has the bandwidth that a cluster file says. ``bridged`` gives each rank one network card, which
all that it sends shares, on a bridge. Needs root and iproute2; nothing is left behind, whatever ends the program; what
a killed one left goes when the next starts.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERFACE = "home"
"""Holds a namespace's address, whichever link a packet takes."""

CARD = "wire"
"""The one interface of a namespace on a bridge."""

PROMPT = "quickack 1"
"""Of routes: acknowledge at once. TCP else delays that by 40 ms now and then, which stalls senders of many tensors; the
networks of real clusters have nothing like it, nor slow starts after a pause, which are off too."""

BURST_BYTES = 32 * 1024
"""What a link that was idle lets through at once: small beside a message, so that it does not count."""

MTU = 9000
"""Bytes of a packet, as clusters have them: a token bucket cuts messages into packets, and each costs the host time."""

LEAST_BURST_BYTES = 9 * 1024
"""A token bucket drops a packet that is larger than its burst, each time it is sent again, too."""

TBF_SHARE = 0.985
"""Of a link's rate, what is left for a message: headers take the rest, and acknowledgements of what comes."""

_SYSCTL = "/proc/sys/net/ipv4"
_CALM = (f"echo 0 > {_SYSCTL}/tcp_slow_start_after_idle", f"echo reno > {_SYSCTL}/tcp_congestion_control")
"""A host's own choice may be BBR, which measures links by leaving them idle now and then, and splits one unevenly."""

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Namespace:
    name: str
    address: str
    interface: str = INTERFACE


@contextmanager
def namespaces(
    count: int, mbit: Callable[[int, int], float | None], *, burst_bytes: int = BURST_BYTES
) -> Iterator[Sequence[Namespace]]:
    """So many namespaces, all joined.

    Args:
        mbit: rate from one namespace to another; None for no limit. Asked for each direction.
        burst_bytes: what a link that was idle lets through at once; a packet at least.
    """
    if burst_bytes < LEAST_BURST_BYTES:
        raise ValueError(f"burst_bytes: expected {LEAST_BURST_BYTES} or more, a packet of {MTU}; found {burst_bytes}")
    with _made(count, INTERFACE) as made:
        for space in made:
            _ip("link set lo up", f"link add {INTERFACE} mtu {MTU} type bridge", within=space)
            _ip(f"addr add {space.address}/32 dev {INTERFACE}", f"link set {INTERFACE} up", within=space)
        for (i, a), (j, b) in itertools.combinations(enumerate(made), 2):
            _ip(f"link add to{j} mtu {MTU} type veth peer name to{i} mtu {MTU} netns {b.name}", within=a)
            _connect(a, b, f"to{j}", mbit(i, j), burst_bytes)
            _connect(b, a, f"to{i}", mbit(j, i), burst_bytes)
        yield made


@contextmanager
def bridged(count: int) -> Iterator[Sequence[Namespace]]:
    """So many namespaces, each with one card on a bridge; ``limit_card`` sets its rate from inside, at any time."""
    with _made(count + 1, CARD) as (*made, hub):
        _ip(f"link add bridge mtu {MTU} type bridge", "link set bridge up", within=hub)
        for i, space in enumerate(made):
            _ip(f"link add to{i} mtu {MTU} type veth peer name {CARD} mtu {MTU} netns {space.name}", within=hub)
            _ip(f"link set to{i} master bridge up", within=hub)
            _ip("link set lo up", f"addr add {space.address}/24 dev {CARD}", f"link set {CARD} up", within=space)
            _ip(f"route replace 10.91.7.0/24 dev {CARD} src {space.address} {PROMPT}", within=space)
        yield made


def limit_card(mbit: float | None) -> None:
    """Rate at which this process's namespace sends from now on, in Mbit/s (1e6); None: as fast as the machine."""
    kind = "pfifo limit 1000" if mbit is None else f"tbf rate {round(mbit * 1e3)}kbit burst {BURST_BYTES} latency 1s"
    _run(["tc", *f"qdisc replace dev {CARD} root {kind}".split()])


def card_bytes() -> int:
    """What this process's namespace has sent on its card so far, headers of the protocols included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == CARD:
            return int(counts.split()[8])
    raise OSError(f"there is no {CARD} here: this process has not entered a namespace on a bridge")


@contextmanager
def _made(count: int, interface: str) -> Iterator[list[Namespace]]:
    """So many namespaces, not joined yet; gone afterwards, links with their ends."""
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run this benchmark as root")
    _remove_stale()
    made = [
        Namespace(name=f"pulse{os.getpid()}r{i}", address=f"10.91.7.{i + 1}", interface=interface) for i in range(count)
    ]
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for space in made:
            _ip(f"netns add {space.name}")
            _run(["ip", "netns", "exec", space.name, "sh", "-ec", "; ".join(_CALM)])
        yield made
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space.name], capture_output=True, timeout=30, check=False)
        signal.signal(signal.SIGTERM, before)


def _leave(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _remove_stale() -> None:
    """Of programs that were killed."""
    folder = Path("/run/netns")
    for path in folder.iterdir() if folder.exists() else ():
        owner = re.fullmatch(r"pulse(\d+)r\d+", path.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, timeout=30, check=False)


def enter(space: Namespace) -> None:
    """Move this process into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space.name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space.name}")


def _connect(source: Namespace, target: Namespace, device: str, mbit: float | None, burst_bytes: int) -> None:
    route = f"route add {target.address}/32 dev {device} src {source.address} {PROMPT}"
    _ip(f"link set {device} up", route, within=source)
    if mbit is not None:
        limit = f"tbf rate {round(mbit * 1e3)}kbit burst {burst_bytes} latency 200ms"
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
