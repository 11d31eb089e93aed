"""``ds_pulse plan --frozen``, and every picture of such a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.pulse_files import PLAN, write_files

from deepspeed_pulse.cli import main
from deepspeed_pulse.ir.plan import Plan

PICTURES = ("plan.png", "plan.svg", "plan.html", "trace.json", "plan.csv")


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(tmp_path)
    write_files()
    layers = [
        {"name": f"{i}", "forward_ms": {"1": ms}, "param_bytes": 1, "output_bytes": 1000, "activation_bytes": 9}
        for i, ms in enumerate((0.5, 0.7, 0.2))
    ]
    parts = [{"name": "latents", "targets": [0], "layers": layers}]
    head = {"format": "pulse-frozen/1", "name": "vae", "device": "none", "dtype": "float32"}
    Path("frozen.json").write_text(json.dumps({**head, "parts": parts}))
    assert main(f"{PLAN} --frozen frozen.json".split()) == 0
    return capsys.readouterr().out


def test_the_table_says_what_runs_in_idle_time(planned: str) -> None:
    assert "frozen in idle time, for the next step: latents (5.6 ms of work on" in planned
    fill = Plan.load("plan.json").fill
    assert fill is not None and {run.microbatch for rank in range(2) for run in fill.runs_of(rank)} == {0, 1, 2, 3}


@pytest.mark.usefixtures("planned")
def test_check_and_simulate_count_it(capsys: pytest.CaptureFixture[str]) -> None:
    files = "plan.json --profile profile.json --cluster cluster.json"
    assert main(f"check {files}".split()) == 0
    assert main(f"simulate {files}".split()) == 0
    capsys.readouterr()
    data = json.loads(Path("plan.json").read_text())
    rows = data["fill"]["rows"]
    first = next(row for row in rows if row)
    del first[0]
    Path("plan.json").write_text(json.dumps(data))
    assert main(f"check {files}".split()) == 1
    assert "fill: part 'latents': never runs" in capsys.readouterr().out


@pytest.mark.usefixtures("planned")
def test_the_tuner_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    tune = "tune profile.json --cluster cluster.json --global-batch 8 --solver-seconds 0 --out tuned.json"
    speeds = {}
    for frozen in ("", " --frozen frozen.json"):
        assert main(f"{tune}{frozen}".split()) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert ("nothing to fill idle time with" in printed) != bool(frozen)
        assert ("frozen in idle time, for the next step: latents" in printed) == bool(frozen)
        found = Plan.load("tuned.json")
        assert (found.fill is not None) == bool(frozen)
        assert found.estimate is not None
        speeds[frozen] = found.estimate.samples_per_second
    assert speeds[""] >= speeds[" --frozen frozen.json"]
    assert main(f"{tune} --frozen frozen.json --verify 1 --model sd15".split()) == 2
    assert "--verify beside --frozen" in capsys.readouterr().err


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("costs", ["", " --profile profile.json --cluster cluster.json"])
def test_every_picture_has_it(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"show plan.json{costs} {' '.join(f'--out {name}' for name in PICTURES)}".split()) == 0
    assert "Z= frozen, for the next step" in capsys.readouterr().out
    assert "frozen, for the next step" in Path("plan.svg").read_text()
    assert "frozen, for the next step" in Path("plan.html").read_text()
    names = [event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]]
    assert any(name.startswith("latents[0:") for name in names)
    assert all(Path(name).stat().st_size > 0 for name in PICTURES)
