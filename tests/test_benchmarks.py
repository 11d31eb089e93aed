"""Benchmarks run, and say which promise they miss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLANNER = Path(__file__).parents[1] / "benchmarks" / "planner" / "run.py"


def planner(line: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PLANNER), *line.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_kept_promise_is_status_0() -> None:
    result = planner("--only uncapped")
    assert result.returncode == 0, result.stderr
    assert "| uniform: makespans within their targets | 57 (<= 57), 105 (<= 105), 117 (<= 117)" in result.stdout


def test_a_missed_promise_is_named_with_status_1() -> None:
    """A hundredth of a second is too little for the caps."""
    result = planner("--only capped --seconds 0.01")
    assert result.returncode == 1
    assert "MISSED uniform, capped: makespans within their targets: P=4 M=8, cap 8: 64 > 60" in result.stderr
    assert "never worse" not in result.stderr
    assert "the search did not improve on dualpipev" in result.stdout


def test_only_whole_runs_are_kept() -> None:
    before = PLANNER.with_name("README.md").read_bytes()
    result = planner("--write --only capped --seconds 1")
    assert result.returncode == 2
    assert "leave out --seconds, --only" in result.stderr
    assert PLANNER.with_name("README.md").read_bytes() == before


def test_the_readme_has_the_newest_figures() -> None:
    """``python benchmarks/headline.py`` writes them."""
    command = [sys.executable, str(PLANNER.parents[1] / "headline.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_memory_is_predicted() -> None:
    """On real ranks, planned over counted; how long a step took here says nothing."""
    command = [sys.executable, str(PLANNER.parents[1] / "prediction" / "run.py"), "--quick", "--only", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "| sleeping, 8 layers | 2 | 1 | 6 | linear | 0 |" in result.stdout, result.stderr
    assert "predicted memory over measured" not in result.stderr
