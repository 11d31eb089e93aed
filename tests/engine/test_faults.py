"""A rank that dies anywhere costs at most the steps since the last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fault_ranks import POINTS
from support.launch import launch

SOME = ("before backward", "after receive", "before write", "before rename")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("points", [SOME, pytest.param(POINTS, marks=pytest.mark.soak)], ids=["some", "all"])
def test_death_at_named_points_is_resumed_exactly(points: tuple[str, ...], tmp_path: Path) -> None:
    case = {"folder": str(tmp_path), "points": points}
    launch("support.fault_ranks:die_at_named_points", 1, case, timeout=880)


def test_sigterm_is_agreed_on_saved_and_resumed(tmp_path: Path) -> None:
    launch("support.fault_ranks:stop_politely", 1, str(tmp_path), timeout=200)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_death_at_random_moments_is_resumed_exactly(tmp_path: Path) -> None:
    case = {"folder": str(tmp_path), "seeds": 30}
    ((_, output),) = launch("support.fault_ranks:die_at_random_moments", 1, case, timeout=1700)
    print(output.splitlines()[-1])
