"""Programs written for DeepSpeed's ``PipelineModule`` train alike with ours: another import, and at most a block."""

from __future__ import annotations

import json

import pytest
from support.drop_in_ranks import BLOCKS, CONSTRUCTS
from support.launch import launch


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    return [output for _, output in launch("support.drop_in_ranks:drop_in", 2, timeout=280)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("construct", [construct.__name__ for construct in CONSTRUCTS])
def test_a_program_trains_as_with_upstream(outputs: list[str], construct: str, block: str) -> None:
    for output in outputs:
        cases = dict(json.loads(line[5:]) for line in output.splitlines() if line.startswith("CASE "))
        assert cases.get(f"{construct}, {block}", output[-3000:]) == "right"
