"""Replicas that read the same data train as one: that is told."""

from __future__ import annotations

from typing import Any

import pytest
from support.cases import launch_each

SAME = "data-parallel replica 1 has read the same inputs, entries and labels as one before it"


@pytest.mark.parametrize("own", [(), ("inputs",), ("labels",)])
def test_replicas_that_read_the_same_are_told_once(subtests: pytest.Subtests, own: tuple[str, ...]) -> None:
    cases: list[dict[str, Any]] = [{"P": 2, "own": own}, {"P": 1, "own": own}]
    outputs = launch_each(subtests, "support.replica_ranks:told_of_same_data", 4, cases[:1], timeout=120)
    outputs += launch_each(subtests, "support.replica_ranks:told_of_same_data", 2, cases[1:], timeout=120)
    assert [output.count(SAME) for output in outputs] == [0 if own else 1, 0, 0, 0, 0 if own else 1, 0]
