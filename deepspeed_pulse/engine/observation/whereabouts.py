"""Where every rank is, kept in the store of the default process group, to say who is late or gone when one is.

A thread of each rank writes a line about once a second; nothing is written per action. Whoever gives up, or has waited
long, reads the lines of all. A rank that is stopped writes no more: its line is old, and says where it was. One that
ends after an error says so in its last line. Lines also name the ranks' processes: of one on the same machine that has
ended without a word, the others know at once. Of such a rank on another machine they know when lines no longer come;
clocks of machines differ, so how old its line is counts from the freshest one that was read.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from deepspeed_pulse.engine.observation.processes import Process, this_process

ANSWER_SECONDS = 3.0
"""How long the store may take to answer; the rank that holds it may be the one that is stopped."""

SHOWN = 32
"""Lines of a message; the ranks that are gone or have been longest in one place come first."""

LONGEST_REASON = 200
"""Characters of a rank's last words that others repeat."""


@dataclass(frozen=True)
class Activity:
    """What a rank is in, in words, and since when (``time.monotonic``)."""

    doing: str
    since: float = field(default_factory=time.monotonic)
    inside: bool = True
    """False where the training script has control."""
    patience: float = float("inf")
    """Seconds that it may last while all other ranks live."""
    gave_up: str = ""
    """Why the rank left its last place by an exception; empty where it did not."""
    meets: bool = False
    """The rank waits for all others there, so that none can answer anything else."""
    communication: str = ""
    """What the training program has called of torch's communication and is in; empty where it is not."""
    may_be_long: bool = False
    """No sign of a silent rank by itself that it lasts: files may be large, a disk slow."""


class Whereabouts:
    """Lines of all ranks in a store that they share, one of each rank every ``beat_seconds``."""

    def __init__(self, store: Any, rank: int, world_size: int, beat_seconds: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._connection: Any = None
        """This object's own to the store: the process group's waits would hold that one up. It is made once, as a new
        one may take seconds where names of hosts are slow to find, and a store is taken for dead after three."""
        self._beat_seconds = beat_seconds
        self._mine = this_process()
        self._ended = threading.Event()
        self._left = ""
        """Why this rank ends, where it is after an error."""
        self._thread: threading.Thread | None = None
        self._answers = True
        self._unanswered_since: float | None = None
        self._is_closed = False
        """The store, on another machine, has broken the connection, and no new one could be made since."""
        self._known: dict[int, dict[str, Any]] = {}
        """The last line that was read of each rank."""
        self._ahead: dict[int, float] = {}
        """How far this rank's clock is ahead of that of a rank on another machine, s, at most."""
        self._unchanged: dict[int, tuple[Any, float]] = {}
        """What tells that a rank goes on, and since when this rank has seen it unchanged."""

    def start(self, place: Callable[[], Activity]) -> None:
        """Begin to write where this rank is; the first line is there when this returns."""
        self._connection = self._store.clone()
        _quietly(lambda: self._write(self._connection, place()))
        self._thread = threading.Thread(target=self._beat, args=(place,), name="pulse-whereabouts", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """This rank ends as it should, or leaves this group: its last line says so."""
        self._say_last(ANSWER_SECONDS)

    def leave(self, reason: str) -> None:
        """This rank ends after an error: its last line says so, if the store answers, and no rank waits for it long."""
        self._left = reason.splitlines()[0][:LONGEST_REASON]
        self._say_last(self._answer_seconds)

    def _say_last(self, seconds: float) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def tell(self, place: Activity) -> None:
        """Write where this rank is, at once."""
        self._ask(lambda store: self._write(store, place))

    def meet(self) -> None:
        """Read all lines, so that the others' processes are known when the store is gone."""
        self._ask(self._read)

    def lost(self) -> list[str]:
        """Lines of ranks that nobody need wait for, by what was read last: they ended after an error, the first first.

        Of a rank on this machine its process tells; of one that holds the store, on another, the store does.
        """
        over = {rank: line for rank, line in self._known.items() if line["left"] or _is_gone(line)}
        found = [text for _, text in sorted(map(self._row, over), key=lambda row: -row[0])]
        if self._is_closed and not self._known[0]["ended"]:
            found.append(f"the store of the process group is gone, with the process that holds it ({self._holder()})")
        return found

    def _gone(self) -> list[int]:
        """Ranks on this machine whose processes have ended, and not as they should."""
        return [rank for rank, line in self._known.items() if _is_gone(line)]

    def gone_soon(self, seconds: float) -> list[int]:
        """Ranks on this machine that are gone, waited for: a connection is closed a little before its process is gone.

        Where none is, ranks on other machines are waited for until they have written, or have been silent for as long
        as :meth:`text` says so.
        """
        began = time.monotonic()
        answered = self._ask(self._read)
        before = {rank: line["at"] for rank, line in self._known.items() if self._is_elsewhere(line)}
        while not self._gone() and time.monotonic() < began + seconds:
            time.sleep(0.05)
        end = began + seconds + self._silence
        while answered and not self._gone() and time.monotonic() < end and self._are_unsure(before):
            time.sleep(self._beat_seconds / 4)
            answered = self._ask(self._read)
        return self._gone()

    def _are_unsure(self, before: dict[int, float]) -> bool:
        """True while a rank may be dead or not: it was as it is now and has been for too short a time."""
        return any(
            line["at"] == before.get(rank) and not _is_last(line) and self._silent(rank, line) <= self._silence
            for rank, line in self._known.items()
        )

    def absent(self, seconds: float) -> list[str]:
        """Lines of ranks that have given no sign of life while this rank looked, for so long, or gave up or ended.

        Reads all lines, which :meth:`lost` needs, too.
        """
        began = time.monotonic()
        answered = self._ask(self._read)
        if answered:
            self._is_closed = False
        elif self._answers and 0 in self._known and self._is_elsewhere(self._known[0]):  # it has failed at once
            self._connection = None  # torch warns at length whenever a broken one is used
            self._is_closed = not self._ask(self._keep_connection)
        now = time.monotonic()
        self._unanswered_since = None if answered else self._unanswered_since or began
        if self._unanswered_since is not None:
            return [self._no_store()] if now - self._unanswered_since > seconds else []
        found = []
        for rank in range(self._world_size):
            line = self._known.get(rank)
            sign = None if line is None or _is_last(line) or line["gave_up"] else line["at"]
            before = self._unchanged.setdefault(rank, (sign, now))
            if before[0] != sign:
                self._unchanged[rank] = sign, now
            elif rank != self._rank and now - before[1] > seconds:
                found.append(self._row(rank)[1])
        return found

    def nobody_answers(self, seconds: float) -> bool:
        """True when all other ranks wait, some of them for all ranks, and have for so long."""
        if not self._ask(self._read):
            return False
        lines = [line for rank, line in self._known.items() if rank != self._rank]
        if len(lines) < self._world_size - 1 or any(line["gave_up"] or _is_last(line) for line in lines):
            return False
        waiting = all(line["waits"] and line["seconds"] > seconds for line in lines)
        return waiting and any(line["meets"] for line in lines)

    def look_anew(self) -> None:
        """Forget how long others, and the store, have been silent."""
        self._unchanged.clear()
        self._unanswered_since = None

    def text(self, place: Activity) -> str:
        """All ranks, a line each, those that are gone or longest in one place first; writes this rank's line before."""

        def ask(store: Any) -> None:
            self._write(store, place)
            self._read(store)

        answered = self._ask(ask)
        self._known[self._rank] = self._line_of(place)
        lines = self._lost_hosts() if answered else [self._no_store()]
        rows = sorted((self._row(rank, answered) for rank in range(self._world_size)), key=lambda row: -row[0])
        more = [f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
        return "\n  ".join(["where the ranks are:", *lines, *(text for _, text in rows[:SHOWN]), *more])

    def _lost_hosts(self) -> list[str]:
        """What is said of other machines that no line comes from any more."""
        found: dict[str, list[tuple[int, bool]]] = {}
        for rank, line in self._known.items():
            if self._is_elsewhere(line):
                is_lost = not _is_last(line) and not line["gave_up"] and self._silent(rank, line) > self._silence
                found.setdefault(line["host"], []).append((rank, is_lost))
        return [
            f"host {host} gives no sign of life ({named([rank for rank, _ in ranks])}): it is down, or its network is"
            for host, ranks in found.items()
            if all(is_lost for _, is_lost in ranks)
        ]

    def _no_store(self) -> str:
        down = ", or its host or the network to it is down" if self._host(0) else ""
        return (
            f"the store of the process group does not answer: the process that holds it ({self._holder()}) is stopped "
            f"or dead{down}, and of others the last that was heard is told"
        )

    def _holder(self) -> str:
        host = self._host(0)
        return f"global rank 0{f' on {host}' if host else ''}, or the launcher"

    def _host(self, rank: int) -> str:
        """Where the rank is; empty where all are on one host."""
        several = len({line["host"] for line in self._known.values()}) > 1
        return f"host {self._known[rank]['host']}" if several and rank in self._known else ""

    def _ask(self, act: Callable[[Any], None]) -> bool:
        """Run ``act`` beside this thread; False where the store does not answer in time."""
        done: list[bool] = []

        def ask() -> None:
            act(self._store.clone() if self._connection is None else self._connection)

        thread = threading.Thread(target=lambda: done.append(_quietly(ask)), daemon=True)
        thread.start()
        thread.join(self._answer_seconds)
        self._answers = bool(done)
        return done == [True]

    @property
    def _answer_seconds(self) -> float:
        """A store that has been waited for in vain is not waited for again."""
        return ANSWER_SECONDS if self._answers else ANSWER_SECONDS / 10

    def _keep_connection(self, connection: Any) -> None:
        self._connection = connection

    def _beat(self, place: Callable[[], Activity]) -> None:
        connection, is_last = self._connection, False
        while not is_last:
            is_last = self._ended.is_set()  # before the line is made, which then says that this rank has ended
            if not _quietly(lambda: self._write(connection, place())):
                return
            self._ended.wait(self._beat_seconds)

    def _write(self, store: Any, place: Activity) -> None:
        store.set(_key(self._rank), json.dumps(self._line_of(place)))

    def _line_of(self, place: Activity) -> dict[str, Any]:
        """This rank's, as others read it."""
        return {
            "doing": f"{place.doing} in {place.communication}" if place.communication else place.doing,
            "seconds": time.monotonic() - place.since,
            "inside": place.inside,
            "gave_up": place.gave_up,
            "waits": place.meets or bool(place.communication),
            "meets": place.meets and not place.communication,
            "ended": self._ended.is_set() and not self._left,
            "left": self._left,
            "at": time.time(),
            "host": socket.gethostname(),
            "process": asdict(self._mine),
        }

    def _read(self, store: Any) -> None:
        ranks = list(range(self._world_size))
        if not store.check([_key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if store.check([_key(rank)])]
        found = store.multi_get([_key(rank) for rank in ranks])
        known = {rank: json.loads(line) for rank, line in zip(ranks, found, strict=True)}
        for rank, line in known.items():
            if self._is_elsewhere(line):
                self._ahead[rank] = min(time.time() - line["at"], self._ahead.get(rank, float("inf")))
        self._known = known

    def _is_elsewhere(self, line: dict[str, Any]) -> bool:
        """True for a rank on another machine, whose clock is another one."""
        return line["process"]["machine"] not in ("", self._mine.machine)

    @property
    def _silence(self) -> float:
        """Seconds without a line after which a rank is said to give no sign of life."""
        return 2.5 * self._beat_seconds + 0.5

    def _silent(self, rank: int, line: dict[str, Any]) -> float:
        """Seconds since the rank wrote the line."""
        return float(max(0.0, time.time() - line["at"] - self._ahead.get(rank, 0.0)))

    def _row(self, rank: int, answered: bool = True) -> tuple[float, str]:
        """How far up it belongs, and the line to show; ``answered``: lines have just been read."""
        line, host = self._known.get(rank), self._host(rank)
        who = f"rank {rank} ({host})" if host else f"rank {rank}"
        if line is None:
            return float("inf"), f"{who}: has not begun, or nothing is known of it"
        doing, silent = line["doing"], self._silent(rank, line)
        if line["left"]:  # the first to end is the cause
            return 1e12 + silent, f"{who}: has ended in {doing.rstrip(',')}: {line['left']}"
        if line["gave_up"]:
            return 1e12, f"{who}: gave up in {doing}: {line['gave_up'][:LONGEST_REASON]}"
        if line["ended"]:
            return 0.0, f"{who}: has ended as it should"
        if _is_gone(line):
            number = line["process"]["number"]
            return float("inf"), f"{who}: is gone, its process {number} was killed or crashed; it was in {doing}"
        seconds = line["seconds"] + silent
        if rank == self._rank or silent <= self._silence:
            return seconds, f"{who}: in {doing} for {seconds:.1f} s"
        if not answered:
            return 1e9 - silent, f"{who}: last heard of {silent:.1f} s ago, in {doing}"
        return 1e9 + seconds, f"{who}: no sign of life for {silent:.1f} s, stopped or dead; it was in {doing}"


def of_default_group(rank: int, beat_seconds: float) -> Whereabouts | None:
    """Whereabouts in the default group's store; None for a rank alone, or for backends without a store."""
    world_size = torch.distributed.get_world_size()
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):  # MPI
        return None
    return None if store is None or world_size == 1 else Whereabouts(store, rank, world_size, beat_seconds)


def _is_last(line: dict[str, Any]) -> bool:
    """True for a line after which its rank writes no other."""
    return bool(line["ended"] or line["left"])


def _is_gone(line: dict[str, Any]) -> bool:
    return not line["ended"] and Process(**line["process"]).is_gone


def _key(rank: int) -> str:
    return f"deepspeed_pulse/whereabouts/{rank}"


def named(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _quietly(act: Callable[[], None]) -> bool:
    """Run ``act``; False where it raised: the store is gone, which others report."""
    try:
        act()
    except Exception:
        return False
    return True
