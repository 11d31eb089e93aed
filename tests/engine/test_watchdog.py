"""The watchdog speaks once, in time, and only about what is under way."""

from __future__ import annotations

import time

from deepspeed_pulse.engine.watchdog import Watchdog

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
