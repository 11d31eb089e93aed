"""Hosts on one machine, as a user's cluster has them: DeepSpeed's launcher goes to them by ssh and starts ranks there.

A host is a network namespace with a card on a bridge, a name of its own, processes of its own (it cannot see the
others') and an sshd. The launcher runs on a third one, which holds no ranks. All see the same files. Nothing that a
host has is kept outside of its namespaces: when they end, it is gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]

if TYPE_CHECKING:
    from namespaces import Namespace
else:
    sys.path.append(str(ROOT / "benchmarks"))

NAMES = ("first", "second")

VARIABLES = """\
DS_ACCELERATOR=cpu
OMP_NUM_THREADS=1
GLOO_SOCKET_IFNAME=wire
"""
"""What the launcher hands on to the hosts; the last is their card (``namespaces.CARD``)."""

TOOLS = ("ip", "mount", "pdsh", "setpriv", "ssh", "ssh-keygen", "sshd", "unshare")

SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
LogLevel ERROR
"""

CLIENT = """
Host *
    IdentityFile {folder}/user_key
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    ServerAliveInterval 5
    ServerAliveCountMax 3
    LogLevel ERROR
"""
"""As docs/how_to/several_hosts.md: without ``ServerAliveInterval`` a launcher waits hours for a host that is off."""

PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where system programs are, beside ``PATH``."""


def lacking() -> str:
    """Why there cannot be hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if _path(tool) is None]
    return f"not installed: {', '.join(missing)} (iproute2, util-linux, openssh, pdsh)" if missing else ""


def _path(tool: str) -> str | None:
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *PATHS]))


class Host:
    """A host that is on from the start."""

    def __init__(self, name: str, space: Namespace, folder: Path) -> None:
        self.name, self.space, self._folder = name, space, folder
        self._outer: subprocess.Popen[bytes] | None = None
        self.switch_on()

    def switch_on(self) -> None:
        """Start what a host starts: its sshd, which is the first of its processes; it listens when this returns."""
        server = ["mount -t tmpfs none /run", "mkdir /run/sshd", f"exec {_path('sshd')} -D -e -f {self._folder}/server"]
        self._outer = start(self.space, self.name, self._folder, server, self._folder / f"{self.name}.log")
        limit = time.monotonic() + 60
        while not any(map(_listens, _children(self._outer.pid))):
            if self._outer.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{self.name}: no sshd: {(self._folder / f'{self.name}.log').read_text()}")
            time.sleep(0.05)

    def switch_off(self) -> None:
        """End all of its processes with SIGKILL, as the kernel does when the first one of a namespace dies."""
        if self._outer is not None:
            end(self._outer)
            self._outer = None

    def ranks(self) -> list[int]:
        """Its Python processes: launchers and ranks."""
        if self._outer is None:
            return []
        first = _children(self._outer.pid)
        namespace = os.readlink(f"/proc/{first[0]}/ns/pid") if first else ""
        return [number for number in _processes() if _is_python_in(number, namespace)]


def start(space: Namespace, name: str, folder: Path, commands: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Run shell commands in namespaces of their own; the last one ``exec``s. They end with this process."""
    script = " && ".join([f"hostname {name}", f"mount --bind {folder}/{name}.hosts /etc/hosts", *commands])
    apart = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
    with log.open("ab") as file:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", space.name, *apart, script],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=folder,
        )


def end(outer: subprocess.Popen[bytes]) -> None:
    """What :func:`start` has started, and all that came of it: the kernel ends a namespace with its first process."""
    for process in _children(outer.pid) if outer.poll() is None else ():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    try:
        outer.wait(timeout=30)
    finally:
        outer.kill()


def _children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _listens(process: int) -> bool:
    """True when somebody listens on ssh's port in the process's network."""
    with suppress(OSError):
        rows = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
        return any(row[1].endswith(":0016") and row[3] == "0A" for row in rows)
    return False


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _is_python_in(number: int, namespace: str) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")[0]
        return os.readlink(f"/proc/{number}/ns/pid") == namespace and b"python" in command
    return False


class Hosts:
    """The hosts, and the machine where the launcher runs."""

    def __init__(self, login: Namespace, hosts: Mapping[str, Host], hub: str, folder: Path) -> None:
        self._login, self._hub, self._folder = login, hub, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.hosts = hosts

    def deepspeed(self, *arguments: str, slots: Mapping[str, int], log: Path) -> subprocess.Popen[bytes]:
        """Start the launcher, with so many ranks on each host; it goes to them by ssh, also where it is one."""
        hostfile = self._folder / "hostfile"
        hostfile.write_text("".join(f"{name} slots={count}\n" for name, count in slots.items()))
        program = Path(sys.executable).with_name("deepspeed")
        words = [str(program), "--hostfile", str(hostfile), "--master_addr", next(iter(slots)), "--force_multi"]
        commands = [
            f"mount --bind {self._folder}/client /etc/ssh/ssh_config",
            f"exec {shlex.join([*words, *arguments])}",
        ]
        self._started.append(start(self._login, "login", self._folder, commands, log))
        return self._started[-1]

    @contextmanager
    def without(self, variable: str) -> Iterator[None]:
        """Launchers that start inside do not hand the variable on."""
        path = self._folder / ".deepspeed_env"
        before = path.read_text()
        path.write_text("".join(line for line in before.splitlines(True) if not line.startswith(f"{variable}=")))
        try:
            yield
        finally:
            path.write_text(before)

    def set_link(self, name: str, state: str) -> None:
        """Pull the cable out of a host ("down"), or put it back ("up")."""
        number = list(self.hosts).index(name)
        subprocess.run(["ip", "-n", self._hub, "link", "set", f"to{number}", state], check=True, timeout=30)

    def end(self) -> None:
        for process in self._started:
            end(process)
        for host in self.hosts.values():
            host.switch_off()


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    """Two hosts and a third machine for the launcher, joined by a switch; keys and settings are in ``folder``.

    Raises SystemExit with the reason where the kernel allows no namespaces.
    """
    from namespaces import bridged

    with bridged(3) as spaces:
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # pytest would go on after a SystemExit
        for key in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, timeout=60)
        names = dict(zip((*NAMES, "login"), spaces, strict=True))
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text("".join(f"{name},{s.address} {public}\n" for name, s in names.items()))
        for mine in names:
            # as Debian writes it: a host's own name stands for an address that others cannot connect to
            known = {"localhost": "127.0.0.1", **{name: s.address for name, s in names.items()}, mine: "127.0.1.1"}
            text = "".join(f"{address} {name}\n" for name, address in known.items())
            (folder / f"{mine}.hosts").write_text(text)
        (folder / ".deepspeed_env").write_text(VARIABLES)
        (folder / "server").write_text(SERVER.format(folder=folder))
        (folder / "client").write_text(CLIENT.format(folder=folder))
        found = Hosts(names["login"], {}, f"{spaces[0].name[:-1]}{len(spaces)}", folder)
        try:
            found.hosts = {name: Host(name, names[name], folder) for name in NAMES}
            yield found
        finally:
            found.end()
