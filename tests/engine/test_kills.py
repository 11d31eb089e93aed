"""Ranks, or the launcher, killed at any moment: nobody is left, the lost rank is named, and the run goes on exactly."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch


def struck(target: str, case: dict[str, Any], timeout: float) -> dict[str, Any]:
    ((_, output),) = launch(f"support.killed_ranks:{target}", 1, case, timeout=timeout)
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))  # type: ignore[no-any-return]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_kills_are_named_and_resumed_exactly(tmp_path: Path) -> None:
    """A rank in a save, then the launcher while the next run starts."""
    strikes = [("saving", 1, 0.3), ("planning", "launch", 1.5)]
    found = struck("given", {"folder": str(tmp_path), "strikes": strikes}, timeout=560)
    assert found["struck"] == 2
    for row in found["rows"]:
        assert row["left"] == 0 and row["named"], row


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_sixty_kills_at_random_moments(tmp_path: Path) -> None:
    case = {"folder": str(tmp_path), "seed": 17, "count": 66, "length": 6}
    found = struck("kills", case, timeout=7000)
    print(json.dumps(found["by_phase"]))
    assert found["struck"] >= 60
    assert sum(row["left"] for row in found["rows"]) == 0, [row for row in found["rows"] if row["left"]]
    unnamed = [row for row in found["rows"] if not row["named"]]
    assert len(unnamed) <= 5, unnamed


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_stopped_ranks_and_polite_requests(tmp_path: Path) -> None:
    """SIGSTOP in every phase, of the rank that holds the store too; SIGTERM before there is an engine."""
    stop, term = int(signal.SIGSTOP), int(signal.SIGTERM)
    strikes: list[tuple[Any, ...]] = [("planning", 1, 0.5, term), ("start-up", 0, 0.2, term)]
    strikes += [(phase, 2, 0.4, stop) for phase in ("start-up", "planning", "measuring", "loading", "steps", "saving")]
    strikes += [("steps", 0, 0.4, stop), ("start-up", 0, 0.4, stop)]
    found = struck("given", {"folder": str(tmp_path), "strikes": strikes}, timeout=1700)
    for row in found["rows"]:
        assert row["left"] == 0 and row["named"], row
