"""Several calls of benchmarks/slow_network, one after another, until all is done; nothing is launched or timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_slow_network import BENCHMARKS, layers


class Calls:
    """What the benchmark sees in place of ranks.

    Attributes:
        begun: models that were measured, in order.
        fails: whether a side of a model fails, given its options.
        left: launches of sides until the time of a call is over.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from slow_network import plans, run
        from slow_network.cases import Case

        self.folder, self.patch, self.run = folder, monkeypatch, run
        self.begun: list[str] = []
        self.launched: list[tuple[str, str]] = []
        self.fails: Any = lambda job: False
        self.left = 10**9

        def case(name: str, ranks: int, *_: Any) -> Case:
            return Case(name=name, title=name, ranks=ranks, samples=1, layers=layers(), time_scale=1.0, byte_scale=1.0)

        @contextmanager
        def bridged(_: int) -> Iterator[None]:
            yield None

        monkeypatch.setattr(run, "make_case", case)
        monkeypatch.setattr(run, "bridged", bridged)
        monkeypatch.setattr(run, "launch", self.launch)
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: 0.0 if self.left > 0 else 1e9))
        monkeypatch.setattr(plans, "SOLVER_SECONDS", 0.0)

    def launch(self, what: Any, ranks: int, job: Any, **_: Any) -> Any:
        from ranks import RanksFailed
        from slow_network import plans, rank

        if what is rank.profile:
            self.begun.append(job.case.name)
            return plans.as_profile(job.case).to_dict()
        if what is rank.calibrate:
            slow = {"mbit": 100.0, "step_ms": 2.0, "ratio": 1.5}
            return {name: slow if ratio else {"step_ms": 1.0, "ratio": 0.0} for name, ratio in job.speeds.items()}
        if what is rank.links:
            return plans.nominal(job.case).to_dict()
        self.left -= 1
        self.launched.append((job.case.name, job.side))
        if self.fails(job):
            raise RanksFailed("rank 1 ended with status 1\n--- rank 0")
        ours = {"p2p_bytes": [{"hidden:0": 64}] * ranks, "peak_live_bytes": [64] * ranks}
        step = {"step_ms": 1.0 + len(self.launched) / 1e3, "card_bytes": [8] * ranks, "slept_ms": [1.0] * ranks, **ours}
        return {speed: [step] for speed in job.speeds}

    def __call__(self, *line: str) -> int:
        self.patch.setattr(
            sys, "argv", ["run.py", "--ranks", "2", "--work", str(self.folder), "--figures", str(self.figures), *line]
        )
        status: int = self.run.main()
        return status

    @property
    def figures(self) -> Path:
        return self.folder / "figures.json"

    @property
    def states(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.json") if path != self.figures)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return Calls(tmp_path, monkeypatch)


def zbv(job: Any) -> bool:
    return bool(job.options.get("zbv"))


def test_the_same_command_ends_with_several_models(calls: Calls) -> None:
    """A finished model waits for the others, and is kept once."""
    line = ("--models", "uvit", "sd2", "--write")
    calls.left = 40
    assert calls(*line) == 3
    assert calls.begun == ["uvit", "sd2"] and len(calls.states) == 2
    (before,) = json.loads(calls.figures.read_text())["uvit-2"]
    calls.left = 10**9
    assert calls(*line) != 3
    assert calls.begun == ["uvit", "sd2"] and not calls.states
    kept = json.loads(calls.figures.read_text())
    assert kept["uvit-2"] == [before] and len(kept["sd2-2"]) == 1


def test_what_is_far_behind_runs_once(calls: Calls) -> None:
    """Stock sides everywhere, others that are not ours on limited links."""
    calls("--models", "uvit", "--write")
    sides = json.loads(calls.figures.read_text())["uvit-2"][0]["sides"]
    counts = {name: [side[speed]["steps"] for speed in calls.run.RATIOS] for name, side in sides.items()}
    stock, ours = {"1F1B, stock", "DualPipeV, stock"}, {"linear", "wave", "auto", "tuned"}
    assert counts == {name: [2, 2, 2] if name in ours else [1, 1, 1] if name in stock else [2, 1, 1] for name in counts}


def test_the_mean_of_all_cases_counts_those_of_earlier_runs(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls("--models", "uvit", "--write")
    calls("--models", "sd2")
    assert "wave over ZB-V, mean of 2 cases" in capsys.readouterr().err


def test_what_cannot_be_kept_is_not_lost(calls: Calls) -> None:
    calls.figures.mkdir()
    with pytest.raises(IsADirectoryError):
        calls("--models", "uvit", "--write")
    calls.figures.rmdir()
    calls("--models", "uvit", "--write")
    assert calls.begun == ["uvit"] and calls.figures.exists() and not calls.states


def test_an_unfinished_run_of_other_code_is_not_gone_on_with(
    calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.left = 1
    assert calls("--models", "uvit") == 3
    monkeypatch.setattr(calls.run, "PLANNER_VERSION", 0)
    calls.left = 10**9
    calls("--models", "uvit")
    assert calls.begun == ["uvit", "uvit"]
    assert "what an earlier call left was made by other code: begun anew" in capsys.readouterr().err


def test_some_sides_leave_an_unfinished_run_alone(calls: Calls) -> None:
    calls.left = 1
    assert calls("--models", "uvit") == 3
    left, calls.left = calls.states, 10**9
    assert calls("--models", "uvit", "--sides", "wave") != 3
    assert calls.states == left


def test_a_side_that_failed_is_tried_once_more_by_a_later_call(calls: Calls) -> None:
    """Last, so that its time does not keep a call from getting on."""
    calls.fails = zbv
    calls.left = 6
    assert calls("--models", "uvit") == 3
    calls.fails, calls.left = (lambda job: False), 10**9
    calls("--models", "uvit", "--write")
    assert calls.launched[-1] == ("uvit", "pipelining")
    assert json.loads(calls.figures.read_text())["uvit-2"][0]["sides"]["ZB-V"]["unlimited"]["steps"] == 2


def test_a_side_that_always_fails_does_not_keep_a_run_from_its_end(calls: Calls) -> None:
    calls.fails = lambda job: job.side == "pipelining"
    statuses = []
    while not statuses or statuses[-1] == 3:
        calls.left = 3
        statuses.append(calls("--models", "uvit"))
    assert statuses[-1] == 1
    assert sum(side == "pipelining" for _, side in calls.launched) == 4
