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


@pytest.mark.parametrize("before", [False, True], ids=["in train_batch", "before train_batch"])
def test_a_loader_that_sends_labels_has_no_partner_in_a_wave(before: bool) -> None:
    case = {"placement": "wave", "before": before}
    (_, first), (_, last) = launch("support.drop_in_ranks:sending_loader", 2, case, timeout=200, check=False)
    assert "TRAINED" not in first + last
    where = "the training script, outside of pulse" if before else "the data loader"
    parts = (f"rank 0, in {where}", "send, called at drop_in_ranks.py:", "nobody will answer")
    parts += ("holds the first and the last stage", "give whole batches, dicts", '"placement": "linear"')
    assert all(part in first for part in parts), first[-3000:]


def test_a_loader_that_sends_labels_trains_on_a_linear_placement() -> None:
    for _, output in launch("support.drop_in_ranks:sending_loader", 2, {"placement": "linear", "before": True}):
        assert "TRAINED" in output


def test_it_says_why_it_is_off() -> None:
    """A misspelt block would train DeepSpeed's way without a word."""
    (_, output), _ = launch("support.drop_in_ranks:says_why_it_is_off", 2, None, timeout=100)
    why = [line.partition("; ")[2] for line in output.splitlines() if line.startswith("pulse: off: ")]
    assert why == [
        'the config has no "pulse" block: "pulse": {} switches it on',
        'the config has no "pulse" block, but \'pulze\': "pulse": {} switches it on',
        '"enabled" is false in the "pulse" block',
    ]
