"""A folder that another process has is waited for: it may have ended on a host that a file server still waits for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_pulse.engine.checkpoints import claim
from deepspeed_pulse.engine.checkpoints.claim import LOCK_FILE, WAIT_SECONDS
from deepspeed_pulse.errors import FileError

HOLDER = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(handle, fcntl.LOCK_EX)
os.write(handle, b"host far, process 7")
print("locked", flush=True)
sys.stdin.read()
"""
WAITS = "another job (host far, process 7) has the lock of this folder; waiting up to 120 s for it"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command, pipe = [sys.executable, "-c", HOLDER, str(tmp_path / LOCK_FILE)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process


@pytest.mark.parametrize("lost", [False, True])
def test_it_is_taken_when_the_other_ends_or_somebody_removes_the_lock(
    holder: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lost: bool,
) -> None:
    def sleep(seconds: float) -> None:
        (tmp_path / LOCK_FILE).unlink() if lost else holder.communicate()

    monkeypatch.setattr(claim, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with claim.claimed(tmp_path):
        assert "far" not in (tmp_path / LOCK_FILE).read_text()
    assert capsys.readouterr().out.count(WAITS) == 1


def test_in_the_end_it_is_refused(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(claim, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    with pytest.raises(FileError, match=r"another job saves .*\(host far, process 7\).*remove .*\.pulse\.lock"):
        claim.claim(tmp_path)
    assert sum(slept) == WAIT_SECONDS and capsys.readouterr().out.count(WAITS) == 1
