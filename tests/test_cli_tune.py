"""``ds_pulse tune``: the table, and the files that run the choice."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from matplotlib import image
from support.pulse_files import write_files

from deepspeed_pulse.cli import main
from deepspeed_pulse.config import parse_pulse
from deepspeed_pulse.ir.plan import Plan

TUNE = "tune profile.json --cluster cluster.json --global-batch 16 --solver-seconds 0"


def run(line: str) -> int:
    return main(line.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files()
    return tmp_path


def limit_memory(num_bytes: int) -> None:
    cluster = json.loads(Path("cluster.json").read_text())
    Path("cluster.json").write_text(json.dumps({**cluster, "memory_bytes": num_bytes}))


def test_plan_config_profile_and_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """80 MB of weights: 320 MB of state do not fit, half of it and its step do. The files agree with each other."""
    limit_memory(220 * 10**6)
    assert run(f"{TUNE} --exhaustive --out plan.json --config ds.json --profile-out b.json --picture tuned.png") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    text = " ".join(printed.out.split())
    assert "16 samples a step on 4 ranks of 0.22 GB" in text
    assert "too little memory" in text
    plan, config = Plan.load("plan.json"), json.loads(Path("ds.json").read_text())
    assert f"PipelineModule(num_stages={plan.pipeline_ranks})" in text
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == plan.microbatch_size
    assert config["gradient_accumulation_steps"] == plan.microbatches
    block = parse_pulse(config["pulse"])
    assert block is not None and block.plan == "plan.json"
    assert plan.rules.zero_stage == config["zero_optimization"]["stage"]
    assert run("check plan.json --profile b.json --cluster cluster.json") == 0
    assert image.imread("tuned.png").shape[1] > 1000
    names = ["b.json", "cluster.json", "ds.json", "plan.json", "profile.json", "tuned.png"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_every_choice_has_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert run(f"{TUNE} --all --exhaustive --memory-gb 0.3") == 0
    out = capsys.readouterr().out
    for word in (
        "data parallel",
        "linear",
        "wave",
        "wave x 2",
        "too few layers",
        "optimizer state and its step alone need",
    ):
        assert word in out
    assert "(--all shows them)" not in out


def test_two_runs_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert run(TUNE) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_search_that_is_ended_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with SIGTERM, which cleans up, and not with SIGKILL, which cannot: nothing is there before the end."""
    before, handler, seen = sorted(folder.iterdir()), signal.getsignal(signal.SIGTERM), []

    def ended(*_: object, **__: object) -> None:
        seen.extend(sorted(folder.iterdir()))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("deepspeed_pulse.planner.tune", ended)
    assert run(f"{TUNE} --out plan.json --config ds.json --profile-out b.json --picture tuned.png") == 2
    assert capsys.readouterr().err == "ds_pulse: error: interrupted\n"
    assert seen == sorted(folder.iterdir()) == before
    assert signal.getsignal(signal.SIGTERM) == handler


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert run(TUNE) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert re.search(r"(\d+)/\1 \d:\d\d:\d\d best [\d.]+ samples/s", text), "all choices are decided at the end"
    assert "\x1b[2K" in text[-20:], "the line is erased"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--config ds.json", "--config names the plan file: give --out PLAN, too"),
        ("--picture tuned.txt", "--picture tuned.txt: expected a name ending in one of .png, .svg, .pdf"),
        ("--world 8", "world size: 8 ranks, the cluster 'toy' has 4"),
        ("--global-batch 0", "expected an integer >= 1, found '0'"),
        ("--memory-gb 0.01 --out plan.json", "nothing fits 0.010 GB a rank on 4 ranks"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], more: str, message: str
) -> None:
    assert run(f"{TUNE} {more}") == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["cluster.json", "profile.json"]


def test_a_plan_for_zero_1_fits_where_another_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """320 MB of state and 80 to step; 300, a bucket of 80 among them, and another one where four share it."""
    plan = (
        "plan profile.json --cluster cluster.json --pipeline-ranks 1 --data-parallel 4 --microbatches 2 "
        "--solver-seconds 0 --memory-gb 0.39 --out plan.json"
    )
    assert run(plan) == 2
    assert "no schedule found fits 0.390 GB" in capsys.readouterr().err
    assert run(f"{plan} --zero-stage 1") == 0
    estimate = Plan.load("plan.json").estimate
    assert estimate is not None and 380e6 <= max(estimate.peak_bytes) <= 390e6
    cluster = json.loads(Path("cluster.json").read_text())
    Path("cluster.json").write_text(json.dumps({**cluster, "memory_bytes": 390_000_000}))
    assert run("check plan.json --profile profile.json --cluster cluster.json") == 0, "it knows what it was made for"


def test_a_fused_optimizer_needs_less(capsys: pytest.CaptureFixture[str]) -> None:
    """320 MB of state; torch's Adam makes 80 MB of roots in its step."""
    memory = "--memory-gb 0.33"
    plan = (
        "plan profile.json --cluster cluster.json --pipeline-ranks 1 --microbatches 2 --solver-seconds 0 "
        f"--out plan.json {memory}"
    )
    assert run(plan) == 2
    assert "the optimizer's step needs up to 0.080 GB beside them" in capsys.readouterr().err
    assert run(f"{plan} --fused-optimizer") == 0
    made = Plan.load("plan.json")
    assert made.rules.fused_optimizer
    assert made.estimate is not None and max(made.estimate.peak_bytes) < 330e6
    capsys.readouterr()
    assert run(f"{TUNE} --all --world 1 {memory} --fused-optimizer --out plan.json") == 0
    assert Plan.load("plan.json").rules.fused_optimizer
