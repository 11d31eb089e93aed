"""A failure in a step ends every rank with an error that says where; nothing hangs, nothing survives."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import bad_ranks
from support.launch import TESTS, free_port, launch

WORLD = 3
SHORT, LONG = 15.0, 600.0
"""``timeout_seconds``: one that a silence reaches, and one that no failure may wait for.

The short one limits the first step too, to which ranks come at different times; and what a rank says after a silence
takes seconds, before the watchdog ends it.
"""


def assert_none_alive(output: str) -> None:
    """None of the ranks that printed their process id is left (a zombie is not alive)."""
    pids = {int(pid) for pid in re.findall(r"PID (\d+)$", output, re.MULTILINE)}
    assert len(pids) == WORLD, output[-4000:]
    alive = pids
    end = time.monotonic() + 60
    while alive and time.monotonic() < end:
        alive = {pid for pid in alive if is_alive(pid)}
        time.sleep(0.05)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive, output[-4000:]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_with_launcher(how: str, timeout: float) -> tuple[int, str]:
    """Exit status and output of DeepSpeed's own launcher; it and all below it are ended at the timeout."""
    case = json.dumps({"how": how, "timeout_seconds": LONG})
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(WORLD)]
    command += ["--master_port", str(free_port()), bad_ranks.__file__, case]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
        pytest.fail(f"{how}: still running after {timeout:g} s:\n{output[-6000:]}")
    return process.returncode, output


@pytest.mark.timeout(600)
def test_an_exception_in_a_layer_ends_the_job_naming_the_place() -> None:
    status, output = run_with_launcher("exception", timeout=550)
    assert status != 0
    where = r"in layer moody\n.*step \d, pipeline rank \d, stage \d, microbatch 0, action \dF0"
    told = re.sub(r"^STEP \d.*\n", "", output, flags=re.MULTILINE)  # another rank's may come in between
    assert re.search(f"ValueError: the layer had enough\n.*{where}", told), output[-6000:]
    # The launcher may end the others before they have printed the step that they did finish.
    assert 1 <= output.count("STEP 0") <= WORLD and "STEP 1" not in output
    assert_none_alive(output)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_killed_rank_ends_the_job_under_the_launcher() -> None:
    status, output = run_with_launcher("kill", timeout=250)
    assert status != 0
    assert "FAILING" in output and "STEP 1" not in output
    assert_none_alive(output)


PEER = (
    r"PeerError: step \d, pipeline rank \d, stage \d, microbatch 0, action \dF0: "
    r"pipeline rank {rank} did not send hidden of microbatch 0 \(stage \d to stage \d\) within"
)


def fail_without_launcher(how: str, timeout_seconds: float, grace: float) -> tuple[int, list[tuple[int, str]]]:
    """Nobody ends the peers but themselves. Rank at fault (-1: none alone), and (status, output) of each."""
    case = {"how": how, "timeout_seconds": timeout_seconds}
    found = launch("support.bad_ranks:fail", WORLD, case, timeout=250, grace=grace, check=False)
    assert_none_alive("".join(output for _, output in found))
    return next((rank for rank, (_, output) in enumerate(found) if "FAILING" in output), -1), found


@pytest.mark.timeout(300)
def test_peers_of_a_killed_rank_end_by_themselves() -> None:
    """Long before ``timeout_seconds``: the connection says so."""
    dead, found = fail_without_launcher("kill", LONG, grace=40)
    for rank, (status, output) in enumerate(found):
        if rank == dead:
            assert status == -signal.SIGKILL
        else:
            assert status == 1, output[-4000:]
            assert "PeerError: step" in output or "watchdog: rank" in output, output[-4000:]
    assert any(re.search(PEER.format(rank=dead), output) for _, output in found), found[0][1][-4000:]


def places_are_told(output: str, frozen: int) -> bool:
    """The message says in which action every rank is and for how long, and that the frozen one is silent."""
    action = r"action \dF\d \(stage \d, microbatch \d\)"
    silent = rf"  rank {frozen}: no sign of life for [\d.]+ s, stopped or dead; it was in {action}$"
    waiting = [rf"  rank {rank}: in {action} for [\d.]+ s$" for rank in range(WORLD) if rank != frozen]
    return all(re.search(line, output, re.MULTILINE) for line in (silent, *waiting))


@pytest.mark.timeout(300)
def test_peers_of_a_frozen_rank_end_after_the_timeout_naming_what_they_waited_for() -> None:
    frozen, found = fail_without_launcher("stop", SHORT, grace=20)
    for rank, (status, output) in enumerate(found):
        if rank == frozen:
            assert status == -signal.SIGKILL, "ended by the test, as a launcher would"
        else:
            assert status == 1, output[-4000:]
            assert re.search(PEER.format(rank=r"\d"), output) or "watchdog: rank" in output, output[-4000:]
    assert any(re.search(PEER.format(rank=frozen), output) for _, output in found)
    assert any(places_are_told(output, frozen) for _, output in found), [output[-2500:] for _, output in found]


@pytest.mark.timeout(300)
def test_data_that_ends_in_a_step_ends_every_rank() -> None:
    _, found = fail_without_launcher("data", SHORT, grace=60)
    for status, output in found:
        assert status == 1, output[-4000:]
        assert any(text in output for text in ("BatchError: ", "PeerError: ", "watchdog: rank")), output[-4000:]
    assert any("the data iterator ended after 1 of 2 microbatches" in output for _, output in found)


@pytest.mark.timeout(300)
def test_a_loader_that_fails_in_a_step_on_one_rank_ends_every_rank() -> None:
    _, found = fail_without_launcher("loader", SHORT, grace=60)
    for status, output in found:
        assert status == 1, output[-4000:]
    assert "OSError: shard 3 cannot be read" in found[2][1] and "pipeline rank 2, stage" in found[2][1]
