"""The watchdog speaks once, in time, and only about what is under way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import torch

from deepspeed_pulse.engine.observation import whereabouts
from deepspeed_pulse.engine.observation.watchdog import OUTSIDE, Watchdog
from deepspeed_pulse.engine.observation.whereabouts import Whereabouts
from deepspeed_pulse.errors import PeerError

TIMEOUT = 0.05
LIMIT = 1.2 * TIMEOUT + 1.0
"""When it acts: a little after the runtime's own waits would have raised."""


def wait_for(said: list[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not said and time.monotonic() < end:
        time.sleep(0.01)


def test_it_says_rank_place_and_knob() -> None:
    said: list[str] = []
    watchdog = Watchdog(3, TIMEOUT, said.append)
    start = time.monotonic()
    watchdog.enter("action 2F0 (stage 2, microbatch 0)")
    wait_for(said, LIMIT + 10)
    assert time.monotonic() - start > 1.0, "it gives the runtime's own errors time to come first"
    assert len(said) == 1
    for part in ("rank 3", "action 2F0 (stage 2, microbatch 0)", '"timeout_seconds" = 0.05'):
        assert part in said[0]


def test_it_is_silent_while_places_change_and_after_leaving() -> None:
    said: list[str] = []
    watchdog = Watchdog(0, TIMEOUT, said.append)
    end = time.monotonic() + LIMIT + 0.3
    while time.monotonic() < end:
        with watchdog.watching("a place"):
            watchdog.enter("another place")
            time.sleep(0.02)
    time.sleep(LIMIT + 0.3)
    assert said == []


def test_it_watches_inside_only_even_after_an_error() -> None:
    said: list[str] = []
    watchdog = Watchdog(0, TIMEOUT, said.append)
    try:
        with watchdog.watching("a place"):
            raise ValueError
    except ValueError:
        pass
    wait_for(said, LIMIT + 0.3)
    assert said == []


BEAT = 0.05


def soon(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_all_ranks_are_named_those_longest_in_one_place_first() -> None:
    store = torch.distributed.HashStore()
    ranks = [Whereabouts(store, rank, 4, 10.0 if rank == 0 else BEAT) for rank in range(3)]  # the first one reads
    watchdogs = [Watchdog(rank, 1000.0, whereabouts=where) for rank, where in enumerate(ranks)]
    watchdogs[1].enter("action 1F0 (stage 1, microbatch 0)")
    assert soon(lambda: bool(store.check(["deepspeed_pulse/whereabouts/1"])))
    # a rank that was stopped long ago; the last one has not begun
    line = {"doing": "action 2B1 (stage 2, microbatch 1)", "seconds": 1.0, "inside": True, "at": time.time() - 50}
    store.set("deepspeed_pulse/whereabouts/2", json.dumps(line))
    with pytest.raises(PeerError) as caught, watchdogs[0].watching("action 0B0 (stage 0, microbatch 0)"):
        raise PeerError("pipeline rank 1 did not send")
    first, title, *rest = str(caught.value).splitlines()
    assert (first, title) == ("pipeline rank 1 did not send", "where the ranks are:")
    assert [row.split(":")[0].strip() for row in rest] == ["rank 3", "rank 2", "rank 1", "rank 0"]
    assert rest[0].endswith("has not begun a step")
    assert "no sign of life for 5" in rest[1] and rest[1].endswith("it was in action 2B1 (stage 2, microbatch 1)")
    assert "in action 1F0 (stage 1, microbatch 0) for" in rest[2]
    assert "in action 0B0 (stage 0, microbatch 0) for" in rest[3]
    watchdogs[1].leave()


def test_a_rank_outside_of_steps_is_said_to_be_there() -> None:
    store = torch.distributed.HashStore()
    watchdog = Watchdog(0, 1000.0, whereabouts=Whereabouts(store, 0, 2, BEAT))
    with watchdog.watching("a place"):
        assert soon(lambda: bool(store.check(["deepspeed_pulse/whereabouts/0"])))
    assert soon(lambda: json.loads(store.get("deepspeed_pulse/whereabouts/0"))["doing"] == OUTSIDE)
    other = Whereabouts(store, 1, 2, BEAT)
    time.sleep(5 * BEAT)  # it writes no more, and is not called silent
    assert f"rank 0: in {OUTSIDE} for" in other.text(("a place", time.monotonic(), True))


class StoppedStore:
    """The process that holds the store does not answer."""

    def clone(self) -> StoppedStore:
        time.sleep(3600)
        return self


def test_a_store_that_does_not_answer_is_said_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "ANSWER_SECONDS", 0.1)
    text = Whereabouts(StoppedStore(), 1, 2, BEAT).text(("a place", time.monotonic(), True))
    assert "did not answer within 0.1 s" in text and "stopped or dead" in text
