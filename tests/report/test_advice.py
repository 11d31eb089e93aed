"""A warning comes when it is due, says what explains the difference, and gives the knob of that alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_pulse.ir.run import Difference, RankMemory
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
    "frozen_ms": "with batches of this size",
    "pauses_ms": "larger microbatches",
    "outside_ms": "slow data loader",
}


@pytest.mark.parametrize("part", KNOBS)
def test_the_part_that_explains_it_comes_first_with_its_knob(part: str) -> None:
    others = {name: 1.0 for name in KNOBS if name != part}
    found = replace(AS_PLANNED, measured_ms=143.0, **{**others, part: 40.0})
    head, first, *rest = warning(found)
    assert head == "warning: the step took 143 ms, 43 % longer than the planned 100 ms; of that"
    assert first.startswith("  +40 ms: ") and KNOBS[part] in first
    assert len(rest) == 4 and not any(knob in line for line in rest for knob in KNOBS.values())


def test_the_stage_that_exceeds_most_is_named() -> None:
    found = replace(AS_PLANNED, measured_ms=130.0, layers_ms=30.0)
    assert "stage 3, 8.25 ms instead of 5 ms a microbatch" in warning(found)[1]


def test_ranks_that_share_cores_are_not_told_to_measure_again() -> None:
    found = replace(AS_PLANNED, measured_ms=130.0, layers_ms=30.0)
    line = warning(found, crowded="4 ranks of 1 thread share 2 cores here")[1]
    assert line.endswith("; 4 ranks of 1 thread share 2 cores here, and plans count with a device for each")


def test_a_shorter_step_is_worth_saying_too() -> None:
    found = replace(AS_PLANNED, measured_ms=70.0, layers_ms=-35.0, outside_ms=5.0)
    head, first, *_ = warning(found)
    assert head.startswith("the step took") and "30 % shorter" in head
    assert first.startswith("  -35 ms: layers") and "ds_pulse profile" in first


def test_nobody_is_told_how_to_lose_what_was_gained() -> None:
    found = replace(AS_PLANNED, measured_ms=70.0, layers_ms=-5.0, outside_ms=-25.0)
    assert warning(found)[1].endswith("beyond their planned time")


@pytest.mark.parametrize("measured", [81.0, 100.0, 119.0])
def test_within_a_fifth_nothing_is_said(measured: float) -> None:
    found = replace(AS_PLANNED, measured_ms=measured, layers_ms=measured - 100)
    assert warning(found) == []
    assert warning(None) == []


def test_more_memory_than_planned_names_the_rank_and_what_it_is() -> None:
    as_planned = RankMemory(planned={"state": 4 * 10**6}, measured={"state": 4 * 10**6})
    fuller = RankMemory(
        planned={"state": 4 * 10**6, "activations": 10**6, "received": 10**6},
        measured={"state": 4 * 10**6, "activations": 3 * 10**6, "received": 12 * 10**5},
    )
    head, first, second = warning(replace(AS_PLANNED, memory=(as_planned, fuller)))
    assert head == "warning: rank 1 held 0.0082 GB, 37 % more than the planned 0.006 GB; of that"
    assert first.startswith("  +2 MB: what forwards keep for backward; measure") and '"memory_gb"' in first
    assert second == "  +0.2 MB: received and not used up yet, buffers of coming receives among it"
    assert warning(replace(AS_PLANNED, memory=(as_planned,))) == []
