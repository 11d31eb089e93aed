"""Ends a rank that waits for one that is gone, stopped or late, saying what it does and where the other ranks are."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from deepspeed_pulse.config import START_SECONDS
from deepspeed_pulse.engine.observation.processes import launchers
from deepspeed_pulse.engine.observation.program import Program
from deepspeed_pulse.engine.observation.progress import DeviceProgress
from deepspeed_pulse.engine.observation.stopping import StopRequest
from deepspeed_pulse.engine.observation.whereabouts import Activity, Whereabouts, named, of_default_group
from deepspeed_pulse.errors import PeerError, PulseError

OUTSIDE = "the training script, outside of pulse,"

PARTING_SECONDS = 10.0
"""How long a rank may take to find out by itself that another one is gone; it then says more than the watchdog can."""

LOST_SECONDS = 2.0
"""How long after a broken connection the watchdog looks for the process that is gone."""

UNANSWERED_SECONDS = 20.0
"""How long the training program may be in a communication of its own while all other ranks wait for this one."""

READ_SECONDS = 10.0
"""The longest time between two looks at the others' lines while a rank waits long."""

_LONG = ', or all live and it takes longer (a slow disk): then raise "timeout_seconds" in the "pulse" block'


def beat_seconds(timeout_seconds: float) -> float:
    """How often the watchdog looks, and tells the other ranks."""
    return min(1.0, timeout_seconds / 4)


def limit_seconds(patience: float) -> float:
    """When the watchdog ends a rank whose place may last ``patience`` seconds: what raises by itself comes before."""
    return min(1.2 * patience, patience + 10.0) + 1.0


class Watchdog:
    """Knows what the rank is doing and since when; a thread of its own looks after it.

    The thread acts where an exception cannot: inside a collective that never returns. The process ends with exit
    status 1 after the message, and the launcher ends the other ranks. There is one watchdog a process
    (:func:`of_process`), from before the process group is started to the end.

    ``rank`` is global. ``timeout_seconds``: longest time in one place of a step; longest silence of another rank
    elsewhere. ``act``: what to do when the time is up, for tests; ends the process by default. ``whereabouts``: where
    the other ranks are; None where that is not known.
    """

    def __init__(
        self,
        rank: int,
        timeout_seconds: float,
        act: Callable[[str], None] | None = None,
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self._rank, self.timeout_seconds = rank, timeout_seconds
        self._act, self._whereabouts = act or _end_process, whereabouts
        self._place = Activity(OUTSIDE, inside=False)
        """One value, so that threads never see half of a change."""
        self._program = Program()
        self._thread: threading.Thread | None = None
        self._launchers = launchers()
        self._looked_at: Activity | None = None
        self._next_look = 0.0
        self._gone_since: float | None = None
        self._group: Any = None
        self._communicating: tuple[str | None, float] = (None, 0.0)
        self.device: DeviceProgress | None = None
        """Of a device that the host does not wait for."""
        self.hint = ""
        """What is said to a program whose communication nobody answers."""
        self.stop_request = StopRequest(self._asked_to_stop)

    def start(self) -> None:
        """Begin to look, and to tell where this rank is."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="pulse-watchdog", daemon=True)
            self._thread.start()
            if self._whereabouts is not None:
                self._whereabouts.start(self._described)

    def _described(self) -> Activity:
        return replace(self._waiting_in(), communication=self._program.communication() or "")

    def _waiting_in(self) -> Activity:
        """What the host does; what the device does where the host has left it behind."""
        place = self._place
        device = None if place.inside or self.device is None else self.device.under_way()
        return place if device is None or not device.inside else device

    def join_others(self) -> None:
        """The process group is there: tell the others where this rank is."""
        group = torch.distributed.group.WORLD
        if group is not self._group:
            self.end()
            self._group = group
            self._whereabouts = of_default_group(self._rank, beat_seconds(self.timeout_seconds))
            if self._whereabouts is not None:
                self._whereabouts.start(self._described)

    def meet(self) -> None:
        """All ranks have come: keep who they are."""
        if self._whereabouts is not None:
            self._whereabouts.meet()

    def end(self) -> None:
        """The process ends as it should."""
        if self._whereabouts is not None:
            self._whereabouts.end()

    def leave(self, reason: str) -> None:
        """The process ends after an error, or for what the watchdog has found: the others are told."""
        if self._whereabouts is not None:
            self._whereabouts.leave(reason)

    def enter(self, doing: str) -> None:
        """The rank starts something that must be over in time."""
        self._place = Activity(doing, patience=self.timeout_seconds)
        self.start()

    def go_on(self, doing: str, *, meets: bool = False) -> None:
        """The next part of the same, with as much patience; ``meets``: it waits for all ranks."""
        self._place = replace(self._place, doing=doing, since=time.monotonic(), meets=meets)

    def got_on(self) -> None:
        """A part of what may last long is done (a file), and the next may last as long; nothing outside of pulse."""
        if self._place.inside:
            self._place = replace(self._place, since=time.monotonic())

    def gave(self) -> None:
        """The device was given all of what the rank was doing so far."""
        if self.device is not None:
            self.device.gave(self._place)

    def gave_outside(self) -> None:
        """What the device was given so far is not pulse's."""
        if self.device is not None:
            self.device.gave(Activity(OUTSIDE, inside=False))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A call into the program's data loader; how long it lasts counts for the whole."""
        before = self._place
        self._place = replace(before, doing=f"the data loader ({before.doing})", meets=False)
        try:
            yield
        finally:
            self._place = before

    def watching(self, doing: str, *, meets: bool = False) -> AbstractContextManager[None]:
        """Watch while inside, where a missing peer's error says where all are; ``meets``: first it waits for all."""
        return self._within(Activity(doing, patience=self.timeout_seconds, meets=meets))

    def watching_patiently(self, doing: str) -> AbstractContextManager[None]:
        """The same for what may take long while all ranks live: starting, planning, saving, loading."""
        return self._within(Activity(doing, patience=max(self.timeout_seconds, START_SECONDS), may_be_long=True))

    @contextmanager
    def _within(self, place: Activity) -> Iterator[None]:
        before, self._place = self._place, place
        self.start()
        after = before
        try:
            yield
        except Exception as problem:
            last = Activity(self._place.doing, inside=False, gave_up=f"{type(problem).__name__}: {problem}")
            told = self._told(problem)
            if self._whereabouts is not None:
                self._whereabouts.tell(last)
            after = before if before.inside else last
            if told is problem:
                raise
            raise told from (problem.__cause__ if isinstance(problem, PeerError) else problem)
        finally:
            self._place = replace(after, since=time.monotonic())

    def _told(self, problem: Exception) -> Exception:
        """What a missing rank has caused, with what this one did, who is gone and where all are; or the same."""
        if self._whereabouts is None or getattr(problem, "is_told", False):
            return problem
        if isinstance(problem, PeerError):
            text = str(problem)
        elif _is_of_a_connection(problem):
            text = f"rank {self._rank}, in {self._place.doing}: {str(problem).splitlines()[0]}"
        else:
            return problem
        gone = self._whereabouts.gone_soon(LOST_SECONDS)
        lost = f"\n{named(gone)} of this machine is gone" if gone else ""
        told = PeerError(f"{text}{lost}{self._where_all_are()}", more="peer-gone")
        told.is_told = True
        return told

    def _asked_to_stop(self) -> None:
        """SIGTERM before there is an engine that could save: nothing is lost by ending."""
        what = f"rank {self._rank}: SIGTERM in {self._place.doing}: this rank ends"
        _end_process(f"{what}{self._parting(what)}", status=143)

    def _watch(self) -> None:
        while True:
            time.sleep(beat_seconds(self.timeout_seconds))
            problem = self._problem(self._waiting_in())
            if problem:
                self._act(f"{problem}; this rank ends{self._parting(problem)}")
                return

    def _parting(self, reason: str) -> str:
        """Where all are; then the others know that this rank ends."""
        where = self._where_all_are()
        self.leave(reason)
        return where

    def _problem(self, place: Activity) -> str:
        """Why the rank cannot go on; empty where it can."""
        missing = next((process for process in self._launchers if process.is_gone), None)
        if missing is not None:
            return f"rank {self._rank} is in {place.doing}, and the launcher (process {missing.number}) is gone"
        unanswered = self._unanswered(place)
        if unanswered or not place.inside:
            return unanswered
        seconds = time.monotonic() - place.since
        # Waits inside the runtime raise by themselves; a little later the watchdog makes sure.
        if seconds > limit_seconds(place.patience):
            allowed = f'"timeout_seconds" = {self.timeout_seconds:g}'
            if place.patience != self.timeout_seconds:
                allowed = f"{place.patience:g} s, which ranks wait for one another here (or "
                allowed += '"timeout_seconds" where that is more)'
            doing = f"rank {self._rank} has been in {place.doing} for {seconds:.0f} s"
            layer = ", or a layer, or torch where memory is short, waits for the whole device: then set "
            layer += '"receive_ahead": false in the "pulse" block'
            more = _LONG if place.may_be_long else layer if self.device is not None else ""
            return f"{doing}, longer than {allowed}: a peer is silent or dead{more}"
        return "" if self._whereabouts is None else self._missing_rank(place, seconds)

    def _unanswered(self, place: Activity) -> str:
        """The program waits for an answer of ranks that wait for this one; empty where it does not."""
        found, now = self._program.communication(), time.monotonic()
        if found is None or self._whereabouts is None or found != self._communicating[0]:
            self._communicating = found, now
            return ""
        seconds, enough = now - self._communicating[1], min(UNANSWERED_SECONDS, self.timeout_seconds / 8)
        if seconds < enough or not self._whereabouts.nobody_answers(enough):
            return ""
        what = (
            f"rank {self._rank}, in {place.doing.rstrip(',')}, has been in {found}, for {seconds:.0f} s, while all "
            f"other ranks wait for this one: nobody will answer{self.hint} [docs: no-partner]"
        )
        self._whereabouts.tell(replace(place, gave_up=what))
        return what

    def _missing_rank(self, place: Activity, seconds: float) -> str:
        """Another rank that this one must not wait for; empty where there is none."""
        assert self._whereabouts is not None
        doing = f"rank {self._rank} has been in {place.doing} for {seconds:.0f} s and"
        every = min(self.timeout_seconds / 4, READ_SECONDS)
        if place is not self._looked_at:
            # where others may be long, their silence counts from the first look
            first = every if place.patience == self.timeout_seconds else 1.0
            self._looked_at, self._gone_since, self._next_look = place, None, time.monotonic() + first
            self._whereabouts.look_anew()
        absent = list[str]()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + every
            absent = self._whereabouts.absent(self.timeout_seconds)
        lost = self._whereabouts.lost()
        if not lost:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic()
            self._whereabouts.meet()  # what they said last: they may have ended as they should
        elif time.monotonic() - self._gone_since > min(self.timeout_seconds, PARTING_SECONDS):
            return f"{doing} cannot go on: {'; '.join(lost[:4])}"
        in_vain = f'waits for others in vain, for longer than "timeout_seconds" = {self.timeout_seconds:g}'
        return f"{doing} {in_vain}: {'; '.join(absent[:4])}" if absent else ""

    def _where_all_are(self) -> str:
        return "" if self._whereabouts is None else f"\n{self._whereabouts.text(self._place)}"


def _is_of_a_connection(problem: Exception) -> bool:
    """True for what collectives raise when another rank is gone or silent."""
    if isinstance(problem, PulseError) or not isinstance(problem, RuntimeError):
        return False
    words = ("/gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(problem, torch.distributed.DistError) or any(word in str(problem) for word in words)


def _end_process(message: str, status: int = 1) -> None:
    # one write: lines of ranks do not mix
    os.write(sys.stderr.fileno(), f"pulse: watchdog: {message}\n".encode())
    os._exit(status)


def hint(placement: Sequence[int], ranks: Sequence[int]) -> str:
    """For a program that sends data between the ranks that it takes for the first and the last."""
    first = placement[0]
    if first != placement[-1]:
        return ""
    return (
        f". Under this wave pipeline rank {first} (rank {ranks[first]}) holds the first and the last stage, so "
        "is_first_stage() and is_last_stage() are true on it alone: a loader that sends labels between the two has no "
        "partner. Let that rank's loader give whole batches, dicts or pairs (inputs, labels), and send nothing: what "
        'other ranks read is sent to them; or set "placement": "linear" in the "pulse" block'
    )


_found: tuple[int, Watchdog] | None = None


def of_process(timeout_seconds: float) -> Watchdog:
    """The process's watchdog, begun if there is none; the newest ``timeout_seconds`` counts."""
    global _found
    if _found is None or _found[0] != os.getpid():  # a child's threads are not the parent's
        _found = os.getpid(), Watchdog(int(os.environ.get("RANK", "0")), timeout_seconds)
    _found[1].timeout_seconds = timeout_seconds
    _found[1].start()
    return _found[1]
