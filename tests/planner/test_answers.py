"""Answers stay as they are: every one that is kept in answers.json is given again (see answers.py)."""

from __future__ import annotations

import json

import answers
import pytest

from deepspeed_pulse.planner.cache import PLANNER_VERSION

KEPT = json.loads(answers.FILE.read_text())
AGAIN = "where that is meant: PYTHONPATH=tests python tests/planner/answers.py"


LONG = {
    *("plans 11", "plans 19", "plans 27", "replicas 5", "searched_orders 3", "searched_orders 7"),
    *("fills 5", "frugal_plans 6", "filled_plans 1", "choices 0", "choices 8", "choices 13"),
}
"""Others ask the same in a fraction of the time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in answers.CASES]
)
def test_the_answer_is_the_kept_one(name):
    found = json.loads(json.dumps(answers.CASES[name]()))
    assert found == KEPT.get(name), f"another answer to {name!r}; {AGAIN}"


def test_no_answer_is_kept_to_what_nobody_asks():
    assert list(KEPT) == [answers.VERSION, *answers.CASES], AGAIN


def test_answers_that_change_belong_to_a_newer_planner():
    assert KEPT[answers.VERSION] == PLANNER_VERSION, AGAIN
