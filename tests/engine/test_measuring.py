"""Ranks measure layers together and agree on what they found."""

from __future__ import annotations

import json

import pytest
import torch
from support.launch import launch

from deepspeed_pulse.engine.data.resizing import resized
from deepspeed_pulse.engine.plans.measuring import shares
from deepspeed_pulse.errors import BatchError


def test_every_rank_measures_its_share() -> None:
    launch("support.measuring_ranks:measures", 3, timeout=200)


EXPECTED = {
    f"{kind} of layer {at}": f"RunError: layer {at}.Fails{text}"
    for at in (0, 3, 5)
    for kind, text in (
        ("build", ", while it is built: ValueError: no such"),
        ("forward", ": ValueError: cannot run"),
        ("backward", ": ValueError: cannot run back"),
    )
} | {
    "no rows": "BatchError: example_batch: entry 'c': expected 2 rows, one a sample, to measure microbatches of 4",
    "other rows": "BatchError: example_batch: expected 3 rows in the first layer's input",
    "no size fits": "expected a microbatch size at which every layer fits the device's memory, found none of 3, 4",
}


def test_an_error_on_one_rank_is_every_ranks() -> None:
    (_, output), *_ = launch("support.measuring_ranks:meets_errors", 3, timeout=200)
    found = dict(json.loads(line[5:]) for line in output.splitlines() if line.startswith("CASE "))
    assert set(found) == set(EXPECTED)
    for name, text in EXPECTED.items():
        assert text in found[name], (name, found[name])
    assert "microbatches of 4 do not fit the device's memory" in output


def test_shares_are_as_equal_as_can_be() -> None:
    assert [len(share) for share in shares(10, 4)] == [2, 3, 2, 3]
    assert shares(2, 4) == [range(1), range(1, 2)]


def test_a_batch_is_repeated_or_cut() -> None:
    hidden, mask, scale = torch.arange(6.0).reshape(3, 2), torch.ones(1, 7), torch.tensor(2.0)
    entries = {"mask": mask, "scale": scale, "word": "text", "pair": (hidden, hidden)}
    more, named = resized(hidden, entries, have=3, want=7)
    assert more[:, 0].tolist() == [0.0, 2.0, 4.0, 0.0, 2.0, 4.0, 0.0]
    assert named["mask"] is mask and named["scale"] is scale and named["word"] == "text"
    assert [len(part) for part in named["pair"]] == [7, 7]
    fewer, _ = resized(hidden, {}, have=3, want=2)
    assert torch.equal(fewer, hidden[:2])
    same, _ = resized(hidden, {"odd": torch.ones(5)}, have=3, want=3)
    assert same is hidden
    with pytest.raises(BatchError, match=r"entry 'odd': expected 3 rows.*found \[5\]"):
        resized(hidden, {"odd": torch.ones(5)}, have=3, want=1)
