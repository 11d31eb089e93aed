"""Times of actions on a device that runs behind its host, and on machines whose clocks differ; unwritable files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_pulse.engine import device
from deepspeed_pulse.engine.device import EngineDevice
from deepspeed_pulse.engine.observation import figures
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Span
from deepspeed_pulse.runtime.stopwatch import Stopwatch


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


def device_of(monkeypatch: pytest.MonkeyPatch, accelerator: Any) -> EngineDevice:
    monkeypatch.setattr(device, "get_accelerator", lambda: accelerator)
    return EngineDevice(torch.device("meta"), lambda *_: None, lambda loss: loss)


def test_times_are_the_device_s_and_it_is_waited_for_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Lagging()
    timed = device_of(monkeypatch, accelerator)
    stopwatch: Stopwatch[Action] = Stopwatch(1, timed)
    with stopwatch.waiting():
        pass
    with stopwatch.waiting():
        pass
    with stopwatch.running(Action.parse("0F0")):
        pass
    with stopwatch.running(Action.parse("0B0")):
        pass
    assert accelerator.waits == 0
    first, second = stopwatch.spans
    assert (first.waited_ms, second.waited_ms, stopwatch.idle_ms) == (20, 0, 20)
    assert [first.end_ms - first.start_ms, second.start_ms - first.start_ms] == pytest.approx([10, 20])
    assert accelerator.waits == 1
    stopwatch.begin()
    assert stopwatch.spans == [] and stopwatch.idle_ms == 0


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
