"""``ds_pulse report``: what a bug report needs, and what a run wrote (a real one: the tests of the engine)."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_pulse.cli import main
from deepspeed_pulse.engine.observation import environment as environment_module
from deepspeed_pulse.engine.observation.environment import environment
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.run import Run
from deepspeed_pulse.ir.schedule import Action


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_without_a_path_it_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    rows = dict(line.strip().split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["deepspeed"] == "0.19.8" and rows["hook"] == "in place"
    assert rows["accelerator"] == "cpu" and rows["communication"] == "gloo"
    assert {"ds_pulse", "python", "torch", "diffusers", "highspy"} <= rows.keys()


def test_a_broken_part_is_said_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ImportError("libsomething.so: cannot open shared object file")

    monkeypatch.setattr(environment_module, "_accelerator", broken)
    rows = dict(environment())
    assert rows["accelerator"] == "broken: ImportError: libsomething.so: cannot open shared object file"
    assert rows["hook"] == "in place"


def test_what_ascend_lacks_is_said_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    versions: dict[str, str | None] = {"torch": "2.13", "torch-npu": None}
    cards: list[str] = []
    monkeypatch.setattr(environment_module, "_minor", versions.get)
    monkeypatch.setattr(environment_module, "_cards", lambda: cards)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert "ascend" not in dict(environment()), "nothing here is for Ascend"
    cards.append("/dev/davinci0")
    assert environment_module._ascend() == (
        "torch-npu is not installed: pip install torch-npu==2.13.*; "
        "ASCEND_HOME_PATH is not set: source set_env.sh of CANN's toolkit"
    )
    versions["torch-npu"] = "2.12"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "none"))
    assert "torch-npu 2.12 beside torch 2.13: expected the same" in environment_module._ascend()
    assert f"there is no folder {tmp_path / 'none'}: install CANN's toolkit" in environment_module._ascend()
    cards.clear()
    assert environment_module._ascend().endswith("there is no card (/dev/davinci0): install the driver")
    versions["torch-npu"] = "2.13"
    cards += ["/dev/davinci0", "/dev/davinci1"]
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert dict(environment())["ascend"] == f"CANN in {tmp_path}, 2 cards"


def test_unusable_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected a run file" in error_of(capsys, str(tmp_path))
    assert "cannot be read" in error_of(capsys, str(tmp_path / "none.json"))
    assert "goes with the folder or file" in error_of(capsys, "--out", "x.png")
    assert "--out x.csv: expected a name ending in one of .png" in error_of(capsys, str(tmp_path), "--out", "x.csv")
    table = tmp_path / "Train_Pulse_step_ms.csv"
    table.write_text("step,step_ms\n4,fast\n")
    assert "expected a table of csv_monitor" in error_of(capsys, str(tmp_path))


@pytest.mark.parametrize("suffix", ["png", "html", "json"])
def test_a_run_without_a_step_is_not_drawn(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither measured nor predicted: the file says what was planned, and that is printed."""
    shape = {"pipeline_ranks": 1, "data_parallel": 1, "microbatches": 1, "microbatch_size": 1}
    schedule = (tuple(map(Action.parse, ("0F0", "1F0", "1B0", "0B0"))),)
    plan = Plan(**shape, boundaries=(0, 1, 2), placement=(0, 0), schedule=schedule)
    run = Run(plan=plan, layers=("a", "b"), costs="a file", planned=None, steps=(), difference=None)
    (tmp_path / "step.run.json").write_text(run.to_json())
    picture = tmp_path / f"a.{suffix}"
    assert "expected a step to draw, found none measured" in error_of(capsys, str(tmp_path), "--out", str(picture))
    assert not picture.exists()
    assert main(["report", str(tmp_path)]) == 0
    assert "no step was measured yet" in capsys.readouterr().out


def test_a_table_of_a_resumed_run_is_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Train_Pulse_step_ms.csv").write_text("step,step_ms\n4,10.5\n8,11\nstep,step_ms\n12,9.25\n")
    assert main(["report", str(tmp_path)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "Pulse_step_ms" in line)
    assert row.split()[1:] == ["3", "12", "10.5", "9.25", "9.25", "11"]
