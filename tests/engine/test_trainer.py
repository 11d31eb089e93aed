"""A trainer of diffusion models written for DeepSpeed trains alike with ours: tuples as they are, names in a wave."""

from __future__ import annotations

import json

import pytest
from support.launch import launch
from support.trainer_ranks import CASES, VARIANTS


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = str(tmp_path_factory.mktemp("trainer"))
    return [output for _, output in launch("support.trainer_ranks:trainer", 2, folder, check=False)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_trains_as_with_upstream(outputs: list[str], case: str, variant: str) -> None:
    for output in outputs:
        verdicts = dict(json.loads(line[5:]) for line in output.splitlines() if line.startswith("CASE "))
        assert verdicts.get(f"{case}, {variant}", output[-3000:]) == "right"
