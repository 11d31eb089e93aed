"""Times of actions on a device that runs behind its host, and on machines whose clocks differ; unwritable files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_pulse.engine import communicator
from deepspeed_pulse.engine.communicator import EngineDevice
from deepspeed_pulse.engine.observation import figures
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Span


class Lagging:
    """An accelerator whose work takes 10 ms an event; the host hands it over in no time."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def use_host_timers(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waits += 1

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        accelerator = self

        class Recorded:
            ms = 0.0

            def record(self) -> None:
                accelerator.now += 10.0
                self.ms = accelerator.now

            def synchronize(self) -> None:
                accelerator.waits += 1

            def elapsed_time(self, end: Any) -> float:
                return float(end.ms - self.ms)

        return Recorded()


def device(monkeypatch: pytest.MonkeyPatch, accelerator: Any) -> EngineDevice:
    monkeypatch.setattr(communicator, "get_accelerator", lambda: accelerator)
    return EngineDevice(torch.device("cpu"), lambda *_: None, lambda loss: loss)


def test_a_measured_step_is_timed_by_the_device_and_waits_for_it_at_its_ends_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Lagging()
    timed = device(monkeypatch, accelerator)
    timed.begin_step(exact=True)
    before = accelerator.waits
    marks = [timed.mark() for _ in range(4)]
    assert accelerator.waits == before
    times = [timed.ms_of(mark) for mark in marks]
    assert [later - times[0] for later in times] == pytest.approx([0, 10, 20, 30])
    assert times[0] <= timed.end_step() + 1000


def test_other_steps_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Lagging()
    timed = device(monkeypatch, accelerator)
    timed.begin_step(exact=True)
    timed.begin_step(exact=False)
    waits = accelerator.waits
    first, second = timed.ms_of(timed.mark()), timed.ms_of(timed.mark())
    timed.end_step()
    assert accelerator.waits == waits and 0 <= second - first < 1000


def span(rank: int, start: float) -> Span:
    return Span(rank=rank, work=Action.parse(f"{rank}F0"), start_ms=start, end_ms=start + 1, waited_ms=0.5)


def test_machines_share_the_time_of_day_and_ranks_of_one_its_clock() -> None:
    ours, theirs = [span(0, 100.0)], [span(1, 9000.0)]
    apart = figures.joined_timeline([(ours, ("a", 50_000.0)), (theirs, ("b", 41_102.0))])
    assert [s.start_ms for s in apart.spans] == pytest.approx([0, 2])
    together = figures.joined_timeline([(ours, ("a", 50_000.0)), ([span(1, 103.0)], ("a", 50_000.3))])
    assert [(s.start_ms, s.end_ms, s.waited_ms) for s in together.spans] == [(0, 1, 0.5), (3, 4, 0.5)]


def test_a_file_that_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    figures._write(tmp_path / "file" / "step.json", lambda path: path.write_text("x"))
    figures._write(tmp_path, lambda path: path.write_text("x"))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(line.startswith("pulse: warning: ") and "is not written" in line for line in said)
