"""Every table reads at 80 columns: no line is longer, no word is broken in two."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from support.pulse_files import COSTS, LAYER, PLAN, write, write_files

from deepspeed_pulse.cli import main
from deepspeed_pulse.ir.choice import Choice, Trial, Tuning, Verdict
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.run import Difference, MeasuredStep, RankFigures, RankMemory, Run
from deepspeed_pulse.report.chosen import chosen_table, options, rejected
from deepspeed_pulse.report.runs import Events, RunFiles
from deepspeed_pulse.report.runs import report as run_report
from deepspeed_pulse.report.tables import plan_table
from deepspeed_pulse.report.tuning import describe, tuning_table

WIDTH = 80


def words_of(text: str) -> set[str]:
    """Without rules, and without the bands of a grid, which are as wide as there is room."""
    lines = (line for line in text.splitlines() if not re.match(r"rank \d+  |\s+\|", line))
    return {word.strip(",;()") for line in lines for word in line.split() if not set(word) <= set("─━")}


def check(narrow: str, wide: str, *more: str) -> None:
    """What is printed at 80 columns fits, and its words are those of the wide form, or the ends of names."""
    assert max(map(len, narrow.splitlines())) <= WIDTH
    known = words_of(" ".join([wide, *more]))
    cut = {word for word in words_of(narrow) - known if not any(name.endswith(word.lstrip("…")) for name in known)}
    assert not cut, narrow


def printed(content: RenderableType, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(content)
    return captured.get()


LONG = [f"down_blocks.{i}.attentions.1.transformer_blocks.0.attn" for i in range(8)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose layers have long names and every column of a profile."""
    monkeypatch.chdir(tmp_path)
    write_files()
    costs = {**LAYER, "weight_grad_ms": 1.0, "spread": 0.25, "activation_bytes": 123_456_789}
    layers = [{"name": name, **costs, "forward_ms": 1.23 + i} for i, name in enumerate(LONG)]
    skips = [{"name": f"down_blocks.{i}.skip", "source": i, "target": 7 - i, "bytes": 10**5} for i in range(4)]
    write("profile.json", "profile", device="cpu", dtype="float32", microbatch_size=1, layers=layers, skips=skips)


def both(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    found = []
    for width in (WIDTH, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(line.split()) in (0, 1)
        found.append(capsys.readouterr().out)
    return found[0], found[1]


TUNE = "tune profile.json --cluster cluster.json --global-batch 16 --solver-seconds 0"
MORE = {"plan": f"{PLAN} --recompute all --zero-stage 1", "wave": f"{PLAN} --placement wave --schedule wave"}


@pytest.mark.parametrize(
    "line",
    [
        *MORE.values(),
        f"{PLAN} --placement wave --schedule zbv --split-backward",
        TUNE,
        f"{TUNE} --all --exhaustive --memory-gb 0.3".replace("batch 16", "batch 4"),
        "show profile.json",
        f"simulate plan.json {COSTS}",
        f"show plan.json {COSTS}",
        f"check plan.json {COSTS}",
        "check broken.json --profile profile.json --cluster small.json",
    ],
)
def test_commands(line: str, files: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main(f"{PLAN} --placement wave --microbatches 12".split())
    plan = json.loads(Path("plan.json").read_text())
    Path("broken.json").write_text(json.dumps({**plan, "schedule": [row[::-1] for row in plan["schedule"]]}))
    Path("small.json").write_text(Path("cluster.json").read_text().replace(str(10**10), str(10**7)))
    capsys.readouterr()
    narrow, wide = both(line, monkeypatch, capsys)
    choices = "choice 1 2 4 8 16 P=1 P=2 P=4 G=1 G=2 G=4 ZeRO 0, 1, wave, linear, pipe-major, data-major, recomputed"
    check(narrow, wide, choices, "microbatch microbatches wave (list scheduling), 1f1b, gpipe, dualpipev, search,")


def trials(sample: Any) -> Tuning:
    """The widest choices there are: several waves, ZeRO, recomputation, another layout, measured."""
    found = []
    for ranks, waves in ((1, 1), (4, 0), (4, 2)):
        choice = Choice(
            pipeline_ranks=ranks,
            data_parallel=128 // ranks,
            waves=waves,
            microbatch_size=16,
            microbatches=128,
            zero_stage=1,
            layout=Layout.DATA_MAJOR,
        )
        solver = replace(sample.plan.solver, name="interleaved" if waves else "wave")
        plan = replace(sample.plan, recompute=tuple(range(8)), solver=solver)
        rate = 12345.6 / (1 + len(found))
        found.append(
            Trial(choice=choice, verdict=Verdict.PLANNED, plan=plan, samples_per_second=rate, measured=rate / 1.1)
        )
    full = replace(found[0], verdict=Verdict.MEMORY, plan=None, reason="needs 3.000 GB a rank of 1.000 GB at least")
    return Tuning(trials=(*found, full), memory_bytes=10**9, profiles={16: sample.profile})


@pytest.mark.parametrize("everything", [False, True])
def test_the_tuners_widest_table(sample: Any, everything: bool) -> None:
    tuning = trials(sample)
    narrow, wide = (printed(tuning_table(tuning, everything=everything), width) for width in (WIDTH, 1000))
    assert "placement" in wide
    shown = [
        describe(trial.choice) + ", recomputed 8 of 8 wave (list scheduling), interleaved," for trial in tuning.trials
    ]
    check(narrow, wide, "choice", *shown)


def test_the_start_of_a_run(sample: Any) -> None:
    """With and without times: what is not known is not said to be nothing."""
    for timed in (True, False):
        table = plan_table(sample.plan, layer_names=LONG, param_counts=[10**9] * 8, costs="of 8 layers", timed=timed)
        narrow, wide = (printed(table, width) for width in (WIDTH, 1000))
        check(narrow, wide)
        assert ("MB sent" in wide) is timed
        assert ("bytes sent are unknown" in wide) is not timed
    tuning = trials(sample)
    table = chosen_table(
        ["num_stages", "train_micro_batch_size_per_gpu"], options(tuning), rejected(tuning), ["a note"]
    )
    check(*(printed(table, width) for width in (WIDTH, 1000)))


def test_what_a_run_has_written(sample: Any) -> None:
    figures = RankFigures(
        p2p_bytes={"hidden": 123 * 10**6, "hidden_grad": 10**9, "value:x": 10**7, "value_grad:x": 10**7},
        local_value_bytes=10**9,
        peak_live_bytes=123 * 10**9,
        idle_ms=1234.5,
    )
    step = MeasuredStep(step=1000, step_ms=123.4, ranks=(figures,) * 4, timeline=sample.timeline)
    memory = RankMemory(planned={"state": 10**9}, measured={"state": 10**9, "activations": 10**9})
    difference = Difference(
        planned_ms=sample.plan.estimate.step_ms,
        measured_ms=123.4,
        layers_ms=50.0,
        pauses_ms=20.0,
        messages_ms=20.0,
        outside_ms=10.0,
        stage=0,
        stage_planned_ms=1.0,
        stage_measured_ms=3.0,
        mean_pause_ms=0.1,
        memory=(memory,) * 4,
    )
    run = Run(
        plan=sample.plan,
        layers=tuple(LONG),
        costs="measured on example_batch",
        planned=sample.timeline,
        steps=(step,),
        difference=difference,
    )
    events = [Events(name="Pulse_p2p_bytes_value_grad", rows=((10.0, 1.23456e9), (20.0, 2.34567e-9)))]
    content = run_report(RunFiles(runs={Path("pulse_run.json"): run}, events={Path("monitor"): events}))
    check(*(printed(content, width) for width in (WIDTH, 1000)))


def test_a_wave_of_that_name_is_told_as_what_it_is(sample: Any) -> None:
    """The schedule "wave" orders linear placements, too."""
    linear = replace(sample.plan, placement=(0, 1, 2, 3), boundaries=(0, 2, 4, 6, 8), routes=(), estimate=None)
    linear = replace(linear, schedule=tuple((a for a in row if a.stage < 4) for row in linear.schedule))
    title = printed(plan_table(replace(linear, solver=replace(sample.plan.solver, name="wave"))), 200).splitlines()[0]
    assert "linear placement" in title and title.endswith("schedule wave (list scheduling)")
