"""Damaged checkpoints: one clear error on every rank, nothing changed on any, and the last good one loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.damage_ranks import FIRST_RANK, LATEST, cases_of, results
from support.launch import launch

WAVE, LINEAR, OFF = {"ranks": 2}, {"ranks": 2, "placement": "linear"}, {"ranks": 2, "off": True}
ZERO, BF16 = "zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"

Jobs = list[tuple[str, dict[str, Any], str]]

JOBS: Jobs = [
    ("same plan", {"saved": WAVE, "loaded": WAVE}, FIRST_RANK),
    ("another plan, ZeRO-1", {"saved": {**WAVE, "zero": 1}, "loaded": {**LINEAR, "zero": 1}}, ZERO),
]
MORE_JOBS: Jobs = [
    ("ZeRO-1", {"saved": {**WAVE, "zero": 1}, "loaded": {**WAVE, "zero": 1}}, ZERO),
    ("pulse off", {"saved": WAVE, "loaded": OFF}, FIRST_RANK),
    ("pulse off before", {"saved": OFF, "loaded": OFF}, FIRST_RANK),
    (
        "another plan, bf16",
        {"saved": {**WAVE, "dtype": "bfloat16", "zero": 1}, "loaded": {**LINEAR, "dtype": "bfloat16", "zero": 1}},
        BF16,
    ),
]


def run(jobs: Jobs, folder: Path) -> dict[str, str]:
    case = {"folder": str(folder), "jobs": jobs}
    (_, output), _ = launch("support.damage_ranks:damaged_checkpoints", 2, case, timeout=500, check=False)
    return results(output) | {"output": output[-3000:]}


def cases(jobs: Jobs) -> list[str]:
    latest = [f"latest: {how}" for how in LATEST]
    return [f"{label}: {name}" for label, job, file in jobs for name in [*cases_of(job["saved"], file), *latest]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(JOBS, tmp_path_factory.mktemp("damage"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases(JOBS))
def test_a_damaged_checkpoint_is_refused_by_all_and_the_good_one_loads(case: str, found: dict[str, str]) -> None:
    assert case in found, f"did not run:\n{found['output']}"
    assert found[case] == ""


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_same_under_more_jobs(tmp_path: Path) -> None:
    found = run(MORE_JOBS, tmp_path)
    assert {case: found.get(case, found["output"]) for case in cases(MORE_JOBS) if found.get(case) != ""} == {}
