"""Whatever a job is stopped as, it goes on as another: optimizer state by parameter name, averages and data too."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.damage_ranks import results
from support.launch import launch
from support.matrix_ranks import Job

Cases = list[tuple[dict[str, Any], list[dict[str, Any]]]]

WAVE, LINEAR, OFF, REPLICAS = {}, {"placement": "linear"}, {"off": True}, {"ranks": 1}
"""Three pipeline ranks as a wave, in a line and with pulse off; and three replicas of one."""
BF16, ZERO = {"dtype": "bfloat16"}, {"zero": 1}

SMALL: Cases = [
    (WAVE, [WAVE, LINEAR, OFF, {**REPLICAS, **ZERO}]),
    ({**REPLICAS, **ZERO, **BF16}, [{**WAVE, **ZERO, **BF16}, {**LINEAR, **BF16}]),
    ({"model": "quantized", **ZERO}, [{"model": "quantized", **LINEAR}]),
    (
        {"model": "ordered"},
        [{"model": "ordered"}, {"model": "ordered", **LINEAR}, {"model": "ordered", **REPLICAS, **ZERO}],
    ),
    ({"model": "shared"}, [{"model": "shared", **LINEAR}, {"model": "shared", **REPLICAS, **ZERO}]),
]

PLANS: list[dict[str, Any]] = [WAVE, LINEAR, OFF, REPLICAS]
JOBS = [{**plan, **zero} for plan, zero in itertools.product(PLANS, ({}, ZERO))]
WHOLE: Cases = [
    ({**base, **kind}, [{**target, **kind} for target in JOBS])
    for kind in ({}, BF16, {"model": "lora"}, {"model": "lora", **BF16}, {"model": "shared"}, {"model": "ordered"})
    for base in JOBS
]


def names(cases: Cases) -> list[str]:
    return [f"{Job(**base)} -> {Job(**target)}" for base, targets in cases for target in targets]


def run(cases: Cases, folder: Path, timeout: float) -> dict[str, str]:
    case = {"folder": str(folder), "cases": cases}
    (_, output), *_ = launch("support.matrix_ranks:resumes", 3, case, timeout=timeout, check=False)
    return results(output) | {"output": output[-3000:]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(SMALL, tmp_path_factory.mktemp("resume"), 250)


@pytest.mark.parametrize("case", names(SMALL))
def test_optimizer_state_goes_on_by_name(case: str, found: dict[str, str]) -> None:
    assert case in found, f"did not run:\n{found['output']}"
    assert found[case] == ""


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_every_job_resumes_as_every_other(tmp_path: Path) -> None:
    found = run(WHOLE, tmp_path, 2900)
    assert {case: found.get(case, found["output"]) for case in names(WHOLE) if found.get(case) != ""} == {}
