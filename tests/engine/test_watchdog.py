"""The watchdog speaks once, in time, and only about what is under way."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_pulse.engine.observation import processes, progress, watchdog, whereabouts
from deepspeed_pulse.engine.observation.processes import Process
from deepspeed_pulse.engine.observation.program import Program
from deepspeed_pulse.engine.observation.progress import DeviceProgress
from deepspeed_pulse.engine.observation.watchdog import OUTSIDE, Watchdog
from deepspeed_pulse.engine.observation.whereabouts import Activity, Whereabouts
from deepspeed_pulse.engine.starting import setting_up
from deepspeed_pulse.errors import PeerError

TIMEOUT = 0.05
LIMIT = 1.2 * TIMEOUT + 1.0
"""When it acts: a little after the runtime's own waits would have raised."""

BEAT = 0.05


def soon(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_it_says_rank_place_and_knob() -> None:
    said: list[str] = []
    dog = Watchdog(3, TIMEOUT, said.append)
    start = time.monotonic()
    dog.enter("action 2F0 (stage 2, microbatch 0)")
    assert soon(lambda: bool(said))
    assert time.monotonic() - start > 1.0, "it gives the runtime's own errors time to come first"
    assert len(said) == 1
    for part in ("rank 3", "action 2F0 (stage 2, microbatch 0)", '"timeout_seconds" = 0.05'):
        assert part in said[0]


def test_it_is_silent_while_places_change_and_after_leaving() -> None:
    said: list[str] = []
    dog = Watchdog(0, TIMEOUT, said.append)
    end = time.monotonic() + LIMIT + 0.3
    while time.monotonic() < end:
        with dog.watching("a place"):
            dog.enter("another place")
            time.sleep(0.02)
    time.sleep(LIMIT + 0.3)
    assert said == []


class Event:
    """Of a device that has done what it was given when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceProgress, list[Event]]:
    """A device's progress, and the events that it recorded."""
    events: list[Event] = []

    def recorded(*, timed: bool) -> Event:
        assert not timed
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(progress, "recorded_event", recorded)
    return DeviceProgress(), events


def test_a_device_that_is_held_up_is_said_although_its_host_went_on(device: Any) -> None:
    said: list[str] = []
    dog = Watchdog(1, TIMEOUT, said.append)
    dog.device, events = device
    with dog.watching("the start"):
        dog.gave_outside()
        for action in ("0F0", "0F1"):
            dog.enter(f"action {action}")
            dog.gave()
    time.sleep(LIMIT + 0.5)
    assert said == [], "what others gave the device may last"
    for event in events[:2]:
        event.passed = True
    assert soon(lambda: bool(said))
    assert "rank 1 has been in action 0F1, on its device, for" in said[0] and '"timeout_seconds" = 0.05' in said[0]


def test_time_counts_from_when_the_device_began(device: Any) -> None:
    found, events = device
    for doing in ("one", "two"):
        found.gave(Activity(doing))
    passed_at = time.monotonic()
    events[0].passed = True
    under_way = found.under_way()
    assert under_way.doing == "two, on its device," and under_way.since >= passed_at
    assert found.under_way() is under_way
    events[1].passed = True
    assert found.under_way() is None


def test_it_watches_inside_only_even_after_an_error() -> None:
    said: list[str] = []
    dog = Watchdog(0, TIMEOUT, said.append)
    with pytest.raises(ValueError), dog.watching("a place"):
        raise ValueError
    time.sleep(LIMIT + 0.3)
    assert said == []


def test_what_lies_inside_another_place_leads_back_to_it() -> None:
    dog = Watchdog(0, 1000.0)
    with dog.watching("train_batch"):
        with dog.watching_patiently("save_checkpoint"):
            assert dog._place.doing == "save_checkpoint" and dog._place.patience == 1000.0
        assert (dog._place.doing, dog._place.inside) == ("train_batch", True)
    assert dog._place.doing == OUTSIDE


def test_each_file_of_a_checkpoint_may_take_as_long() -> None:
    dog = Watchdog(0, 1000.0)
    before = dog._place
    dog.got_on()
    assert dog._place is before, "nothing of pulse's goes on"
    with dog.watching_patiently("save_checkpoint"):
        dog._place = replace(dog._place, since=time.monotonic() - 1500)
        assert dog._problem(dog._place)
        dog.got_on()
        assert dog._place.doing == "save_checkpoint" and not dog._problem(dog._place)


def test_what_may_be_long_while_all_live_says_so() -> None:
    dog = Watchdog(0, 600.0)
    long_ago = time.monotonic() - 700
    assert 'then raise "timeout_seconds"' in dog._problem(Activity("s", long_ago, patience=600.0, may_be_long=True))
    assert dog._problem(Activity("action 0F0", long_ago, patience=600.0)).endswith("a peer is silent or dead")


BEGUN: list[Watchdog] = []


@pytest.fixture
def store() -> Iterator[Any]:
    yield torch.distributed.HashStore()
    while BEGUN:
        BEGUN.pop().end()  # a thread that is in the store when the process ends aborts it


def begin(store: Any, rank: int, size: int, timeout: float = 1000.0, act: Any = None, beat: float = BEAT) -> Watchdog:
    """The watchdog of a rank of several in this process."""
    dog = Watchdog(rank, timeout, act or (lambda message: None), whereabouts=Whereabouts(store, rank, size, beat))
    dog.start()
    BEGUN.append(dog)
    return dog


def line_of(dog: Watchdog, rank: int, **changes: Any) -> None:
    """Another rank's line, as if it had written it."""
    process = {"machine": "", "number": 0, "started": ""}
    line = {"doing": "there", "seconds": 1.0, "inside": True, "gave_up": "", "ended": False, "left": ""}
    line["at"] = time.time()
    line["host"] = socket.gethostname()
    assert dog._whereabouts is not None
    dog._whereabouts._store.set(
        f"deepspeed_pulse/whereabouts/{rank}", json.dumps({**line, "process": process, **changes})
    )


@pytest.fixture
def gone_process() -> dict[str, Any]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        found = Process.find(child.pid)
        assert found is not None and not found.is_gone
        child.kill()
        assert soon(lambda: found.is_gone), "a process that waits for its parent to notice is gone"
    assert found.is_gone
    return vars(found)


def test_all_ranks_are_named_those_gone_or_longest_in_one_place_first(store: Any, gone_process: Any) -> None:
    dog = begin(store, 0, 6, beat=4.0)  # so that a busy machine makes no line of now an old one
    line_of(dog, 1, doing="action 1F0 (stage 1, microbatch 0)")
    line_of(dog, 2, doing="action 2B1 (stage 2, microbatch 1)", at=time.time() - 50)
    line_of(dog, 4, doing="action 4B1", process=gone_process)
    line_of(dog, 5, doing="save_checkpoint", gave_up="FileError: disk full", inside=False)
    with pytest.raises(PeerError) as caught, dog.watching("action 0B0 (stage 0, microbatch 0)"):
        raise PeerError("pipeline rank 1 did not send")
    first, gone, title, *rest = str(caught.value).splitlines()
    assert (first, title) == ("pipeline rank 1 did not send", "where the ranks are:")
    assert gone == "rank 4 of this machine is gone"
    assert {row.split(":")[0].strip() for row in rest[:2]} == {"rank 3", "rank 4"}
    assert [row.split(":")[0].strip() for row in rest[2:4]] == ["rank 5", "rank 2"]
    text = "\n".join(rest)
    assert "rank 3: has not begun" in text
    assert f"rank 4: is gone, its process {gone_process['number']} was killed or crashed; it was in action 4B1" in text
    assert "rank 5: gave up in save_checkpoint: FileError: disk full" in text
    assert (
        re.search(r"rank 2: no sign of life for 5\d\.", text) and "it was in action 2B1 (stage 2, microbatch 1)" in text
    )
    assert "rank 1: in action 1F0 (stage 1, microbatch 0) for" in text
    assert "rank 0: in action 0B0 (stage 0, microbatch 0) for" in text


def test_a_broken_connection_is_told_with_what_was_done_and_who_is_gone(store: Any, gone_process: Any) -> None:
    dog = begin(store, 0, 2)
    line_of(dog, 1, doing="load_checkpoint", process=gone_process)
    closed = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2")
    with pytest.raises(PeerError) as caught, dog.watching_patiently("save_checkpoint"):
        raise closed
    assert str(caught.value).startswith("rank 0, in save_checkpoint: [/third_party/gloo")
    assert "rank 1 of this machine is gone" in str(caught.value) and "it was in load_checkpoint" in str(caught.value)
    assert caught.value.__cause__ is closed
    with pytest.raises(RuntimeError, match=r"^mine$"), dog.watching("a place"):
        raise RuntimeError("mine")


def test_a_rank_that_is_gone_is_not_waited_for(store: Any, gone_process: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(watchdog, "PARTING_SECONDS", 0.2)
    said: list[str] = []
    dog = begin(store, 0, 2, 4.0, said.append)
    line_of(dog, 1, process=gone_process)
    dog.meet()
    time.sleep(1.5)
    assert said == [], "outside there is nothing that it could wait for"
    with dog.watching_patiently("building layers"):
        assert soon(lambda: bool(said))
    assert "rank 0 has been in building layers for" in said[0]
    gone = f"rank 1: is gone, its process {gone_process['number']} was killed or crashed; it was in there"
    assert f"s and cannot go on: {gone}; this rank ends" in said[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "rank 1: no sign of life"),
        ({"gave_up": "OSError: no"}, "rank 1: gave up in there: OSError: no"),
        ({"ended": True}, "rank 1: has ended as it should"),
        (None, "rank 1: has not begun"),
    ],
)
def test_a_silent_rank_is_not_waited_for(store: Any, changes: Any, told: str, monkeypatch: Any) -> None:
    said: list[str] = []
    dog = begin(store, 0, 2, 1.0, said.append)
    if changes is not None:
        line_of(dog, 1, **changes)
    with dog.watching_patiently("planning"):
        assert soon(lambda: bool(said))
    assert 'longer than "timeout_seconds" = 1' in said[0] and told in said[0].splitlines()[0]


def test_ranks_that_live_are_waited_for_outside_of_steps(store: Any) -> None:
    dog = begin(store, 0, 2)
    assert dog._whereabouts is not None
    for moment in range(10):
        line_of(dog, 1, at=float(moment))
        assert dog._whereabouts.absent(0.05) == [], "a new line is a sign of life, whenever it comes"
        time.sleep(0.1)
    assert "rank 1" in dog._whereabouts.absent(0.05)[0]


def test_without_its_launcher_a_rank_ends(gone_process: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(watchdog, "launchers", lambda: (Process(**gone_process),))
    said: list[str] = []
    Watchdog(0, 1.0, said.append).start()
    assert soon(lambda: bool(said))
    assert f"the launcher (process {gone_process['number']}) is gone; this rank ends" in said[0]


@pytest.mark.parametrize(("name", "expected"), [("deepspeed", 1), ("train.py", 0), ("torchrun", 1)])
def test_launchers_are_known_by_their_command_lines(name: str, expected: int, tmp_path: Path) -> None:
    look = "from deepspeed_pulse.engine.observation.processes import launchers; print(len(launchers()))"
    script = tmp_path / name
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {look!r}], check=True)\n")
    # behind a shell, as --no_python and user scripts have it
    command = ["sh", "-c", f"{sys.executable} -u {script} --local_rank=0; true"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout) == expected


def test_a_process_of_another_machine_is_never_said_to_be_gone(gone_process: Any) -> None:
    assert not Process(**{**gone_process, "machine": "another"}).is_gone
    assert not Process(**{**gone_process, "machine": ""}).is_gone
    assert Process(**{**vars(processes.this_process()), "started": "0"}).is_gone, "another process has the number now"


AWAY = {"host": "second", "process": {"machine": "another", "number": 7, "started": "1"}}
"""Of a rank on another host."""


def test_a_host_that_is_lost_is_told_though_its_clock_is_another(store: Any) -> None:
    """A connection breaks before a line is old enough, so there is a little wait."""
    dog = begin(store, 0, 4)
    other = 1000.0
    line_of(dog, 1)
    for rank in (2, 3):
        line_of(dog, rank, at=time.time() - other, doing=f"action {rank}F0", **AWAY)
    dog.meet()
    with pytest.raises(PeerError) as caught, dog.watching("action 0B0 (stage 0, microbatch 0)"):
        raise PeerError("pipeline rank 2 did not send")
    _, _, lost, *rows = caught.value.text.splitlines()
    assert lost == "  host second gives no sign of life (ranks 2, 3): it is down, or its network is"
    silent = r"rank 2 \(host second\): no sign of life for \d+\.\d s, stopped or dead; it was in action 2F0"
    assert re.search(silent, "\n".join(rows)), rows
    assert f"rank 0 (host {socket.gethostname()}): in action 0B0" in rows[-1]


def test_a_host_on_which_a_rank_lives_is_not_lost(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dog = begin(store, 0, 3, beat=0.8)
    where = dog._whereabouts
    assert where is not None
    line_of(dog, 1, **AWAY)
    line_of(dog, 2, **AWAY)
    dog.meet()
    read = where._read

    def read_a_new_line(store: Any) -> None:
        line_of(dog, 2, at=time.time() + 500.0, **AWAY)  # its clock was set meanwhile
        read(store)

    monkeypatch.setattr(where, "_read", read_a_new_line)
    assert where.gone_soon(0.0) == []
    text = where.text(Activity("here"))
    assert "rank 1 (host second): no sign of life" in text and "rank 2 (host second): in there for" in text
    assert "host second gives" not in text


def test_a_rank_that_ends_after_an_error_is_told_and_not_waited_for(store: Any, monkeypatch: Any) -> None:
    """On another host nothing but its last line tells; ``timeout_seconds`` is 1000 s."""
    monkeypatch.setattr(watchdog, "PARTING_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "READ_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "beat_seconds", lambda timeout_seconds: BEAT)
    said: list[str] = []
    dog, failing = begin(store, 0, 4, act=said.append), begin(store, 1, 4)
    line_of(dog, 2, ended=True, **AWAY)
    line_of(dog, 3, left="ValueError: the cause", doing="loading,", at=time.time() - 10.0)
    monkeypatch.setattr(failing._whereabouts, "_mine", Process("another", 7, "1"))
    monkeypatch.setattr(sys, "last_value", MemoryError("no more\nsecond line"), raising=False)
    setting_up._end(failing)
    with dog.watching("action 0B0 (stage 0, microbatch 0)"):  # which may last as long as a rank may be silent
        assert soon(lambda: bool(said))
    first, here = said[0].splitlines()[0], rf"\(host {re.escape(socket.gethostname())}\)"
    cause = rf"rank 3 {here}: has ended in loading: ValueError: the cause"
    other = rf"rank 1 {here}: has ended in the training script, outside of pulse: MemoryError: no more"
    assert re.search(rf"^rank 0 has been in action 0B0 .* s and cannot go on: {cause}; {other}; this", first), first
    assert "rank 2" not in first, "it has ended as it should"
    last = json.loads(store.get("deepspeed_pulse/whereabouts/0"))
    assert last["left"] == first.partition("; this rank ends")[0][:200] and not last["ended"]


class StoppedStore:
    """The process that holds the store does not answer."""

    def clone(self, *_: Any) -> Any:
        time.sleep(3600)

    set = check = multi_get = clone


class GoneStore:
    """No connection to it is made any more."""

    def clone(self) -> Any:
        raise RuntimeError("connection refused")


@pytest.mark.parametrize("kind", [StoppedStore, GoneStore])
def test_a_store_that_does_not_answer_is_said_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(whereabouts, "ANSWER_SECONDS", 0.1)
    text = Whereabouts(kind(), 1, 2, BEAT).text(Activity("a place"))
    assert "the store of the process group does not answer" in text and "stopped or dead" in text
    assert "rank 1: in a place for" in text, "of itself a rank knows without a store"


def test_without_the_store_nobody_is_said_to_be_dead_and_its_host_is_named(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = begin(store, 1, 3)
    where = dog._whereabouts
    assert where is not None
    line_of(dog, 0, at=time.time() - 50, **AWAY)
    line_of(dog, 2, at=time.time() - 50)
    dog.meet()
    monkeypatch.setattr(whereabouts, "ANSWER_SECONDS", 0.1)
    where._connection = StoppedStore()
    text = where.text(Activity("a place"))
    assert "(global rank 0 on host second, or the launcher) is stopped or dead, or its host or the network to" in text
    assert re.search(r"rank 2 \(host [^)]+\): last heard of 5\d.\d s ago, in there", text)
    assert "no sign of life" not in text


def test_a_store_is_waited_for_as_long_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "ANSWER_SECONDS", 0.05)
    where = Whereabouts(StoppedStore(), 1, 2, BEAT)
    assert where.absent(1000.0) == []
    assert soon(lambda: bool(where.absent(0.2)))


def test_a_store_on_another_host_that_takes_no_connection_is_gone(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank can leave no line."""
    monkeypatch.setattr(whereabouts, "ANSWER_SECONDS", 0.5)
    where = begin(store, 1, 2)._whereabouts
    assert where is not None
    line_of(BEGUN[-1], 0, **AWAY)
    where.meet()
    for stores, is_lost in (((GoneStore(), store), False), ((GoneStore(), StoppedStore()), True)):
        where._connection, where._store = stores  # the broken one, and what a new one would be to
        assert where.absent(1000.0) == []
        assert bool(where.lost()) == is_lost, stores
    (lost,) = where.lost()
    assert lost.endswith("is gone, with the process that holds it (global rank 0 on host second, or the launcher)")
    where._known[0]["ended"] = True
    assert where.lost() == [], "it has ended as it should, and its store with it"


@pytest.fixture
def usual_sigterm() -> Iterator[None]:
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_sigterm_is_heard_while_the_main_thread_is_busy(usual_sigterm: None) -> None:
    from deepspeed_pulse.engine.observation.stopping import StopRequest

    heard: list[bool] = []
    request = StopRequest(lambda: heard.append(True))
    request.listen()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)  # ends it, and its parent hears nothing
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert heard == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert soon(lambda: bool(heard))
    request.ignore()


def test_a_look_at_the_program_outlives_threads_that_come_and_go() -> None:
    """Threads that are not Python's, as torch's and gloo's are: CPython 3.11 listed them before they were whole."""
    program, looks, end = Program(), 0, time.monotonic() + 3

    def look() -> None:
        nonlocal looks
        while time.monotonic() < end:
            assert program.communication() is None
            looks += 1

    looking = threading.Thread(target=look)
    looking.start()
    libc, routine = ctypes.CDLL(None), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    while time.monotonic() < end:
        thread = ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, routine, None)
        libc.pthread_join(thread, None)
    looking.join(timeout=30)
    assert looks


def test_a_look_names_what_the_program_is_in() -> None:
    program, seen, lock = Program(), list[Any](), threading.Lock()

    def look() -> None:
        soon(lambda: program.communication() is not None)
        seen.extend([program.communication(), Program().communication()])
        lock.release()

    names: dict[str, Any] = {}
    file = Path(torch.distributed.__file__).with_name("its_own.py")
    exec(compile("def send(lock): lock.acquire()", file, "exec"), names)
    lock.acquire()
    threading.Thread(target=look).start()
    names["send"](lock)
    assert re.fullmatch(r"send, called at test_watchdog\.py:\d+", seen[0])
    assert seen[1] is None, "another thread does not know the main thread's stack"
