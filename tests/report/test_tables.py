"""The start-up table and the measured one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console, Group, RenderableType
from rich.table import Table

from deepspeed_pulse.ir.buckets import BUCKET_BYTES
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.plan import Solver
from deepspeed_pulse.ir.run import Difference, MeasuredStep, RankFigures, RankMemory
from deepspeed_pulse.planner import Job, SearchOptions, make_plan, simulate
from deepspeed_pulse.report.tables import estimate_table, measured_table, plan_table


def text_of(content: RenderableType) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(content)
    return capture.get()


def rows_of(content: Group) -> list[list[str]]:
    (table,) = (part for part in content.renderables if isinstance(part, Table))
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_start_up_table(sample: Any) -> None:
    table = plan_table(sample.plan, profile=sample.profile)
    text = text_of(table)
    first = text.splitlines()[0]
    assert first.startswith("pulse: 4 ranks, wave placement, 8 stages, 8 microbatches of 2, schedule ")
    gigabytes = f"{sample.plan.estimate.peak_bytes[0] / 1e9:.2f}"
    assert rows_of(table)[:2] == [["0", "0", "0 (block0)", "2M", gigabytes], ["", "7", "7 (block7)", "", ""]]
    assert f"step {sample.plan.estimate.step_ms:.3g} ms" in text
    assert f"bubble {100 * sample.plan.estimate.bubble_ratio:.1f} %" in text
    assert "costs: profile toy (paper, float32)" in text


def test_start_up_table_names_the_skips_that_travel(sample: Any) -> None:
    assert "sent between ranks" not in text_of(plan_table(sample.plan))
    routes = [
        dataclasses.replace(route, hops=((0, 1),)) if i < 2 else route for i, route in enumerate(sample.plan.routes)
    ]
    sent = dataclasses.replace(sample.plan, routes=tuple(routes))
    assert "sent between ranks: 2 of 4 named values (skip0, skip1)" in text_of(plan_table(sent))


@pytest.mark.parametrize(("optimizer_ms", "said"), [(0.0, "step 60 ms, bubble"), (8.0, "(8 ms of it the optimizer's)")])
def test_a_step_says_what_of_it_is_the_optimizer_s(sample: Any, optimizer_ms: float, said: str) -> None:
    figures = dataclasses.replace(sample.plan.estimate, step_ms=60.0, optimizer_ms=optimizer_ms)
    assert said in text_of(estimate_table(sample.plan, sample.timeline, figures))


def test_ranks_send_together_what_a_microbatch_sends(sample: Any) -> None:
    """Also where one rank encodes the first microbatch and another the second."""
    layer = FrozenLayer(name="e", forward_ms=5.0, param_bytes=1, output_bytes=3_000_000, activation_bytes=1)
    part = FrozenPart(name="text", layers=(layer,), targets=(0, 3))
    job = Job(profile=sample.profile, cluster=sample.cluster, pipeline_ranks=4, microbatches=8, frozen=(part,))
    plan = make_plan(job, SearchOptions(placement="wave", solver_seconds=0))
    timeline = simulate(plan, sample.profile, job.cluster)
    assert timeline.carried and plan.estimate is not None
    rows = rows_of(estimate_table(plan, timeline, plan.estimate))
    sent = sum(float(row[4].split()[0]) for row in rows)
    assert sent == pytest.approx(plan.estimate.p2p_bytes_per_microbatch / 1e6, abs=0.05 * len(rows))


def test_plan_alone(sample: Any) -> None:
    bare = dataclasses.replace(sample.plan, estimate=None, solver=None)
    assert rows_of(plan_table(bare))[0] == ["0", "0", "0", "-", "-"]
    assert "predicted:" not in text_of(plan_table(bare))


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("search", 64.0, 60.0, "the search shortened the step of wave, the best generator, by 6.2 %: 64 ms to 60 ms"),
        ("search", 2246.987, 2243.538, "by 0.15 %: 2246.99 ms to 2243.54 ms"),
        ("wave", 60.0, 60.0, "the search did not improve on wave (step 60 ms)\n"),
        ("highs", 60.0, 60.0, "the search did not improve on wave (step 60 ms); its order is no longer and fits"),
    ],
)
def test_what_the_search_gained_is_said(sample: Any, name: str, before: float, after: float, said: str) -> None:
    solver = Solver(name=name, optimal=False, generator="wave", generator_step_ms=before)
    estimate = dataclasses.replace(sample.plan.estimate, step_ms=after)
    assert said in text_of(plan_table(dataclasses.replace(sample.plan, solver=solver, estimate=estimate)))


def test_nothing_is_said_of_a_search_that_did_not_run(sample: Any) -> None:
    assert sample.plan.solver.generator is None
    assert "the search" not in text_of(plan_table(sample.plan))


def test_costs_say_where_they_came_from(sample: Any) -> None:
    table = plan_table(sample.plan, param_counts=[1000] * 8, layer_names=["x"] * 8, costs="parameter counts")
    assert "costs: parameter counts" in text_of(table)
    assert rows_of(table)[0][3] == "2k"


@pytest.mark.parametrize(
    ("replicas", "bucket_bytes", "said"),
    [(2, 250_000, "gradients summed in buckets of 0.25 MB"), (2, BUCKET_BYTES, None), (1, 250_000, None)],
)
def test_small_buckets_are_said(sample: Any, replicas: int, bucket_bytes: int, said: str | None) -> None:
    plan = dataclasses.replace(sample.plan, data_parallel=replicas, bucket_bytes=bucket_bytes)
    text = text_of(plan_table(plan))
    assert said in text if said else "buckets" not in text


def measured_step(sample: Any, step_ms: float, peaks: list[int]) -> MeasuredStep:
    ranks = tuple(
        RankFigures(p2p_bytes={}, local_value_bytes=0, peak_live_bytes=peak, idle_ms=rank + 1)
        for rank, peak in enumerate(peaks)
    )
    return MeasuredStep(step=1, step_ms=step_ms, ranks=ranks, timeline=sample.timeline)


def test_measured_beside_predicted(sample: Any) -> None:
    step = sample.plan.estimate.step_ms
    measured = measured_step(sample, 1.1 * step, [10**9] * 4)
    rows = rows_of(measured_table(sample.plan, measured))
    assert rows[0] == ["step", f"{step:.3g} ms", f"{1.1 * step:.3g} ms", "+10.0 %", ""]
    assert rows[1][2] == f"{100 * sample.timeline.bubble_ratio:.1f} %"
    assert ["rank 3 idle", "-", "4 ms", "", ""] in rows
    assert len(rows) == 2 + 2 * 4


def test_what_explains_most_stands_beside_a_difference(sample: Any) -> None:
    step, peaks = sample.plan.estimate.step_ms, sample.plan.estimate.peak_bytes
    found = Difference(
        planned_ms=step,
        measured_ms=step - 5,
        layers_ms=3.0,
        pauses_ms=0.0,
        messages_ms=-8.0,
        outside_ms=0.0,
        stage=0,
        stage_planned_ms=1.0,
        stage_measured_ms=1.0,
        mean_pause_ms=0.0,
        memory=tuple(
            RankMemory(planned={"state": peak}, measured={"state": peak, "received": rank * 10**6})
            for rank, peak in enumerate(peaks)
        ),
    )
    measured = measured_step(sample, step - 5, [memory.measured_bytes for memory in found.memory])
    rows = rows_of(measured_table(sample.plan, measured, found))
    assert [row[4] for row in rows[:2]] == ["messages -8 ms", ""]
    assert [row[4] for row in rows[2::2]] == ["", "received +1 MB", "received +2 MB", "received +3 MB"]


def test_measured_without_a_prediction(sample: Any) -> None:
    measured = measured_step(sample, 5.0, [10**9] * 4)
    rows = rows_of(measured_table(dataclasses.replace(sample.plan, estimate=None), measured))
    assert rows[0] == ["step", "-", "5 ms", "", ""] and rows[2] == ["rank 0 GB", "-", "1.00", "", ""]
    assert {row[1] for row in rows} == {"-"}
