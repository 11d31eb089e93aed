"""Replicas that read the same data train as one: that is told."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.cases import launch_each

SAME = "has read the same inputs, entries and labels as one before it"
CASES: list[dict[str, Any]] = [
    {"P": ranks, "own": own} for ranks, own in itertools.product((2, 1), ([], ["inputs"], ["labels"]))
]


def test_replicas_that_read_the_same_are_told_once(subtests: pytest.Subtests) -> None:
    """Two pipelines of two ranks, and four replicas."""
    outputs = launch_each(subtests, "support.replica_ranks:told_of_same_data", 4, CASES, timeout=200)
    first, *others = [output.split("CASE ")[1:] for output in outputs]
    for case, said in zip(CASES, first, strict=True):
        told = "replica 1 " if case["P"] == 2 else "replica 1, 2, 3 "
        assert said.count(SAME) == (not case["own"]) and (told + SAME in said) is not bool(case["own"]), said
    assert not any(SAME in said for output in others for said in output)
