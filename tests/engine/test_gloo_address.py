"""A host whose name stands for a loopback address: other hosts' ranks cannot connect, which is said before they try."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch

from deepspeed_pulse.engine.starting import joining, start
from deepspeed_pulse.errors import ConfigError

TOLD = "the name of this host, second, stands for 127.0.1.1 here"

DEBIAN = {"MASTER_ADDR": "first", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "LOCAL_RANK": "0", "RANK": "2"}


@pytest.fixture
def on_second(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in DEBIAN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "second")
    names_are(monkeypatch, "127.0.1.1")
    return monkeypatch


def names_are(patch: pytest.MonkeyPatch, address: str) -> None:
    def lookup(name: str, port: Any) -> list[Any]:
        if not address:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (address, 0))]

    patch.setattr(socket, "getaddrinfo", lookup)


def test_the_line_comes_before_and_the_error_has_it(
    on_second: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**options: Any) -> None:
        assert TOLD in capsys.readouterr().out
        raise RuntimeError("Gloo connectFullMesh failed with timed out connecting, remote=[127.0.1.1]:40372")

    on_second.setattr(deepspeed, "init_distributed", fail)
    with pytest.raises(ConfigError, match=rf"{TOLD}.*set GLOO_SOCKET_IFNAME.*remote=\[127.0.1.1\]"):
        start.init_distributed(1.0)


@pytest.mark.parametrize(
    ("variables", "address", "told"),
    [
        ({}, "", "stands for no address here"),
        ({}, "::1", "stands for ::1 here"),
        ({"LOCAL_SIZE": None, "LOCAL_WORLD_SIZE": "2"}, "127.0.0.1", "stands for 127.0.0.1 here"),
        ({}, "10.0.0.7", ""),
        ({}, "fe80::1%eth0", ""),
        ({"LOCAL_SIZE": "4"}, "127.0.1.1", ""),
        ({"LOCAL_SIZE": None}, "127.0.1.1", ""),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.1.1", ""),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", ""),
    ],
)
def test_it_is_said_where_it_is_so(
    on_second: pytest.MonkeyPatch, variables: dict[str, str | None], address: str, told: str
) -> None:
    for name, value in variables.items():
        if value is None:
            on_second.delenv(name)
        else:
            on_second.setenv(name, value)
    names_are(on_second, address)
    found = start._unreachable()
    assert told in found if told else found == ""


WAITS = """
import sys, time
from deepspeed_pulse.engine.starting.joining import all_join
with all_join("no road leads there"):
    print("joins", flush=True)
    time.sleep(100)
"""


@pytest.mark.timeout(150)
def test_ranks_that_wait_for_one_that_failed_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "joins\n"
            with pytest.raises(RuntimeError, match="refused"), joining.all_join("no road leads there"):
                raise RuntimeError("refused")
            assert waiting.wait(60) == 1
            assert "another rank could not connect: no road leads there" in waiting.stdout.read()
        finally:
            waiting.kill()
