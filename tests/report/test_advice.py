"""A warning comes when it is due, says what explains the difference, and gives the knob of that alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_pulse.ir.run import Difference
from deepspeed_pulse.report.advice import warning

AS_PLANNED = Difference(
    planned_ms=100.0,
    measured_ms=100.0,
    layers_ms=0.0,
    pauses_ms=0.0,
    messages_ms=0.0,
    outside_ms=0.0,
    stage=3,
    stage_planned_ms=5.0,
    stage_measured_ms=8.25,
    mean_pause_ms=0.25,
)
KNOBS = {
    "layers_ms": "ds_pulse profile",
    "messages_ms": 'key "cluster"',
    "pauses_ms": "larger microbatches",
    "outside_ms": "plans count no optimizer",
}


@pytest.mark.parametrize("part", KNOBS)
def test_the_part_that_explains_it_comes_first_with_its_knob(sample: Any, part: str) -> None:
    others = {name: 1.0 for name in KNOBS if name != part}
    found = replace(AS_PLANNED, measured_ms=143.0, **{**others, part: 40.0})
    head, first, *rest = warning(sample.plan, found, sample.plan.estimate.peak_bytes)
    assert head == "warning: the step took 143 ms, 43 % longer than the planned 100 ms; of that"
    assert first.startswith("  +40 ms: ") and KNOBS[part] in first
    assert len(rest) == 3 and not any(knob in line for line in rest for knob in KNOBS.values())


def test_the_stage_that_exceeds_most_is_named(sample: Any) -> None:
    found = replace(AS_PLANNED, measured_ms=130.0, layers_ms=30.0)
    assert "stage 3, 8.25 ms instead of 5 ms a microbatch" in warning(sample.plan, found, [0] * 4)[1]


def test_ranks_that_share_cores_are_not_told_to_measure_again(sample: Any) -> None:
    found = replace(AS_PLANNED, measured_ms=130.0, layers_ms=30.0)
    line = warning(sample.plan, found, [0] * 4, crowded="4 ranks of 1 thread share 2 cores here")[1]
    assert line.endswith("; 4 ranks of 1 thread share 2 cores here, and plans count with a device for each")


def test_a_shorter_step_is_worth_saying_too(sample: Any) -> None:
    found = replace(AS_PLANNED, measured_ms=70.0, layers_ms=-35.0, outside_ms=5.0)
    head, first, *_ = warning(sample.plan, found, [0] * 4)
    assert "30 % shorter" in head and first.startswith("  -35 ms: layers") and "ds_pulse profile" in first


@pytest.mark.parametrize("measured", [81.0, 100.0, 119.0])
def test_within_a_fifth_nothing_is_said(sample: Any, measured: float) -> None:
    found = replace(AS_PLANNED, measured_ms=measured, layers_ms=measured - 100)
    assert warning(sample.plan, found, sample.plan.estimate.peak_bytes) == []
    assert warning(sample.plan, None, sample.plan.estimate.peak_bytes) == []


def test_more_memory_than_planned_names_the_rank(sample: Any) -> None:
    peaks = list(sample.plan.estimate.peak_bytes)
    peaks[2] = int(1.5 * peaks[2])
    (line,) = warning(sample.plan, AS_PLANNED, peaks)
    assert line.startswith("warning: rank 2 held ") and "50 % more than the planned" in line and '"memory_gb"' in line
