"""The start-up table and the measured one."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console, RenderableType

from deepspeed_pulse.report.tables import measured_table, plan_table


def text_of(content: RenderableType) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(content)
    return capture.get()


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def test_start_up_table(sample: Any) -> None:
    text = text_of(plan_table(sample.plan, profile=sample.profile))
    first = text.splitlines()[0]
    assert first.startswith("pulse: 4 ranks, wave placement, 8 stages, 8 microbatches of 2, schedule ")
    gigabytes = f"{sample.plan.estimate.peak_bytes[0] / 1e9:.2f}"
    assert rows_of(text)[:2] == [["0", "0", "0 (block0)", "2M", gigabytes], ["", "7", "7 (block7)", "", ""]]
    assert f"step {sample.plan.estimate.step_ms:.3g} ms" in text
    assert f"bubble {100 * sample.plan.estimate.bubble_ratio:.1f} %" in text
    assert "costs: profile toy (paper, float32)" in text


def test_plan_alone(sample: Any) -> None:
    bare = dataclasses.replace(sample.plan, estimate=None, solver=None)
    text = text_of(plan_table(bare))
    assert rows_of(text)[0] == ["0", "0", "0", "-", "-"]
    assert "predicted:" not in text


def test_costs_say_where_they_came_from(sample: Any) -> None:
    text = text_of(plan_table(sample.plan, param_counts=[1000] * 8, layer_names=["x"] * 8, costs="parameter counts"))
    assert "costs: parameter counts" in text
    assert rows_of(text)[0][3] == "2k"


def test_measured_beside_predicted(sample: Any) -> None:
    step = sample.plan.estimate.step_ms
    table = measured_table(
        sample.plan, step_ms=1.1 * step, bubble_ratio=0.25, peak_bytes=[10**9] * 4, idle_ms=[1, 2, 3, 4]
    )
    rows = rows_of(text_of(table))
    assert rows[0] == ["step", f"{step:.3g} ms", f"{1.1 * step:.3g} ms", "+10.0 %"]
    assert rows[1][2] == "25.0 %"
    assert ["rank 3 idle", "-", "4 ms", ""] in rows
    assert len(rows) == 2 + 2 * 4


def test_measured_without_a_prediction(sample: Any) -> None:
    rows = rows_of(text_of(measured_table(dataclasses.replace(sample.plan, estimate=None), step_ms=5.0)))
    assert rows == [["step", "-", "5 ms", ""]]
