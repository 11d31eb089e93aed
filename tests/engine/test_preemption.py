"""SIGTERM while an engine trains: the processes that a program starts, and the data it loses with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

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


def stay(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.mark.parametrize("stays", [False, True])
def test_a_worker_of_a_data_loader_that_is_ended_is_named_and_one_that_stays_gives_data(stays: bool) -> None:
    """A launcher sends the signal to all of a rank's processes."""
    loader = DataLoader(list(range(64)), num_workers=1, timeout=60, worker_init_fn=stay if stays else None)
    data = iter(loader)
    assert int(next(data)) == 0

    def rest() -> list[int]:
        os.kill(data._workers[0].pid, signal.SIGTERM)
        return [int(one) for one in data]

    if stays:
        assert rest() == list(range(1, 64))
        return
    with pytest.raises(
        (RuntimeError, OSError, EOFError)
    ) as caught:  # as the signal comes, while the rank waits or reads
        rest()
    told = without_worker(caught.value, heard=True)
    assert told is not None and "worker_init_fn=f" in told.text and "nothing is saved" in told.text


def test_what_has_another_cause_keeps_its_own_words() -> None:
    ended = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated. ")
    assert without_worker(ended, heard=False) is not None
    for other in (RuntimeError("another"), OSError("shard 3"), ValueError("DataLoader worker")):
        assert without_worker(other, heard=False) is None
    assert without_worker(ValueError("another"), heard=True) is None
