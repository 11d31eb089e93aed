"""Monitor, timers and traces of a real run, and what ``ds_pulse report`` makes of what it wrote."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.launch import launch
from support.observe_ranks import STEPS

from deepspeed_pulse.cli import main
from deepspeed_pulse.engine.device import QUEUES
from deepspeed_pulse.engine.observation.notes import crowded, too_few_queues, unheard
from deepspeed_pulse.ir.run import RUN_FILE, Run


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run with everything switched on, and what its first rank printed."""
    folder = tmp_path_factory.mktemp("run")
    return folder, launch("support.observe_ranks:observed", 2, str(folder), timeout=200)[0][1]


def table(path: Path) -> list[tuple[int, float]]:
    with path.open(newline="") as file:
        return [(int(row[0]), float(row[1])) for row in list(csv.reader(file))[1:]]


def test_the_monitor_is_told_at_upstreams_cadence(observed: tuple[Path, str]) -> None:
    events = observed[0] / "events"
    found = {path.stem.removeprefix("Train_Pulse_") for path in events.glob("Train_Pulse_*.csv")}
    kinds = ("hidden", "hidden_grad", "value", "value_grad")
    assert found == {
        *("step_ms", "makespan_ms", "bubble_ratio", "idle_ms", "peak_live_bytes", "local_value_bytes"),
        *("predicted_step_ms", "predicted_bubble_ratio", "predicted_peak_bytes"),
        *(f"p2p_bytes_{kind}" for kind in kinds),
    }
    losses = table(events / "Train_Samples_train_loss.csv")
    assert len(losses) == STEPS
    for name in found:
        rows = table(events / f"Train_Pulse_{name}.csv")
        # every second step, on upstream's axis of samples
        assert [samples for samples, _ in rows] == [losses[1][0], losses[3][0]], name
    hidden, back = (table(events / f"Train_Pulse_p2p_bytes_{kind}.csv") for kind in ("hidden", "hidden_grad"))
    assert hidden == back and hidden[0][1] > 0
    assert 0 <= table(events / "Train_Pulse_bubble_ratio.csv")[0][1] < 1


def test_the_baseline_tells_its_bytes_under_the_same_names(observed: tuple[Path, str]) -> None:
    rows = table(observed[0] / "baseline" / "Train_Pulse_p2p_bytes_value.csv")
    assert len(rows) == 1 and rows[0][1] > 0
    assert (observed[0] / "baseline" / "Train_Pulse_step_ms.csv").is_file()


def test_upstreams_breakdown_is_fed(observed: tuple[Path, str]) -> None:
    _, output = observed
    names = "batch_input", "fwd_microstep", "bwd_microstep", "bwd_inner_microstep", "step_microstep"
    pipes = "pipe_send_output", "pipe_send_grad", "pipe_recv_input", "pipe_recv_grad"
    for name in (*names, "fwd", "bwd", *pipes):
        printed = re.findall(rf"\| {name}: ([0-9.]+)", output)
        assert len(printed) == STEPS // 2, (name, output[-3000:])
        assert any(map(float, printed)), (name, printed)  # of a quick one, some may be rounded to 0


def test_the_chosen_steps_are_traced_below_the_planned_one(observed: tuple[Path, str]) -> None:
    events = json.loads((observed[0] / "traces" / "step.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.partition(" rank")[0] for name in processes[::2]] == ["planned", "step 2", "step 4"]
    run = Run.load(observed[0] / "traces" / "step.run.json")
    for step in run.steps:
        assert [tuple(span.work for span in step.timeline.spans_of(r)) for r in (0, 1)] == list(run.plan.schedule)
        assert all(span.waited_ms >= 0 for span in step.timeline.spans)
    assert run.difference is not None


def test_the_parts_of_the_difference_add_up(observed: tuple[Path, str]) -> None:
    run = Run.load(observed[0] / "checkpoints" / RUN_FILE)
    found = run.difference
    assert found is not None and found.measured_ms == run.steps[-1].step_ms
    parts = found.layers_ms + found.pauses_ms + found.messages_ms + found.outside_ms
    assert parts == pytest.approx(found.measured_ms - found.planned_ms)
    counted = [rank.peak_live_bytes for rank in run.steps[-1].ranks]
    assert [memory.measured_bytes for memory in found.memory] == counted
    assert tuple(memory.planned_bytes for memory in found.memory) == run.plan.estimate.peak_bytes
    # a peak may come before the first backward has made every gradient, which plans count as state
    assert all(
        memory.planned["state"] / 2 < memory.measured["state"] <= memory.planned["state"] for memory in found.memory
    )


def test_the_table_is_printed_once(observed: tuple[Path, str]) -> None:
    assert observed[1].count("measured beside predicted") == 1


def test_report_prints_and_draws_what_the_run_wrote(
    observed: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(observed[0])]) == 0
    printed = capsys.readouterr().out
    for part in ("wave placement", "measured beside predicted", "measured steps", "step.run.json", "Pulse_step_ms"):
        assert part in printed, printed
    picture, page = tmp_path / "run.png", tmp_path / "run.html"
    run = observed[0] / "traces" / "step.run.json"
    assert main(["report", str(run), "--out", str(picture), "--out", str(page)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG" and "planned" in page.read_text()
    capsys.readouterr()
    assert main(["report", str(observed[0]), "--out", str(picture)]) == 2
    assert "expected one run file to draw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "threads", "ranks", "cores", "told"),
    [
        ("cpu", 2, 4, 2, "export OMP_NUM_THREADS=1"),
        ("cpu", 16, 4, 16, "export OMP_NUM_THREADS=4"),
        ("cpu", 4, 4, 16, None),
        ("cpu", 1, 4, 2, None),
        ("cpu", 8, 1, 8, None),
        ("cuda", 16, 4, 16, None),
    ],
)
def test_threads_that_hold_each_other_up(device: str, threads: int, ranks: int, cores: int, told: str | None) -> None:
    found = crowded(device, threads, ranks, cores)
    assert found is None if told is None else found is not None and told in found


@pytest.mark.parametrize(
    ("backend", "queues", "communicators", "told"),
    [
        ("nccl", None, 6, None),
        ("nccl", None, 7, f"export {QUEUES}=32"),
        ("nccl", "16", 15, f"export {QUEUES}=32"),
        ("nccl", "32", 30, None),
        ("nccl", "32", 31, "torch has 32 a device"),
        ("hccl", None, 50, None),
    ],
)
def test_streams_that_share_a_queue_are_told(
    monkeypatch: pytest.MonkeyPatch, backend: str, queues: str | None, communicators: int, told: str | None
) -> None:
    """A device has 8 where nothing is said, 32 at most; and torch has as many streams."""
    monkeypatch.delenv(QUEUES, raising=False)
    if queues is not None:
        monkeypatch.setenv(QUEUES, queues)
    found = too_few_queues(backend, communicators)
    assert found is told is None or (f"up to {communicators + 2} streams" in str(found) and str(told) in str(found))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled: "),
        ({"autotuning": {"enabled": True}}, "autotuning.enabled: "),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled: "),
        ({"activation_checkpointing": {"partition_activations": True}}, "activation_checkpointing: "),
        ({"checkpoint": {"parallel_write": {"pipeline_stage": False}}}, "checkpoint.parallel_write.pipeline_stage: "),
        ({"checkpoint": {"tag_validation": "Ignore"}}, "checkpoint.tag_validation: "),
        (
            {
                "flops_profiler": {"enabled": False},
                "activation_checkpointing": {},
                "checkpoint": {"parallel_write": {"pipeline_stage": True}, "tag_validation": "Fail"},
            },
            None,
        ),
    ],
)
def test_settings_that_do_nothing_in_a_pipeline_are_told(config: dict[str, Any], told: str | None) -> None:
    found = list(unheard(config))
    assert [line.startswith(told or "") for line in found] == ([] if told is None else [True])
