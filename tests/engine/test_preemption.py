"""SIGTERM while an engine trains: the processes that a program starts, and the data it loses with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from deepspeed_pulse.engine.checkpoints.preemption import Preemption, without_worker


@pytest.fixture
def listening() -> Iterator[Preemption]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found = Preemption(10.0)
    yield found
    found.end()
    signal.signal(signal.SIGTERM, before)


def test_a_process_that_the_program_forks_ends_by_its_first_signal(listening: Preemption) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert not listening.heard
    os.kill(os.getpid(), signal.SIGTERM)
    assert listening.heard


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. "),
        RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
        ConnectionResetError(104, "Connection reset by peer"),
        EOFError(),
    ],
)
def test_a_worker_of_a_data_loader_that_is_ended_is_named(problem: Exception) -> None:
    """What torch raises where a launcher has sent the signal to all of a rank's processes, by who notices first."""
    told = without_worker(problem, heard=True)
    assert told is not None and "worker_init_fn=f" in told.text and "nothing is saved" in told.text


def test_what_has_another_cause_keeps_its_own_words() -> None:
    ended = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")
    assert without_worker(ended, heard=False) is not None
    left = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    assert without_worker(left, heard=True) is not None and without_worker(left, heard=False) is None
    for other in (RuntimeError("another"), OSError("shard 3"), ValueError("DataLoader worker")):
        assert without_worker(other, heard=False) is None
    assert without_worker(ValueError("another"), heard=True) is None
