"""The "pulse" block: defaults, and every wrong key or value named with what was expected."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from deepspeed_pulse.config import PulseConfig, parse_pulse
from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS


def test_schedules_are_the_planners() -> None:
    assert set(get_args(PulseConfig.model_fields["schedule"].annotation)) == {"auto", *GENERATORS}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (None, None),
        (True, PulseConfig()),
        ({}, PulseConfig()),
        (False, PulseConfig(enabled=False)),
        ({"enabled": False}, PulseConfig(enabled=False)),
        ({"waves": 2, "memory_gb": 3, "solver_seconds": 0}, PulseConfig(waves=2, memory_gb=3.0, solver_seconds=0.0)),
        ({"memory_gb": "auto", "plan": None, "trace": "t.json"}, PulseConfig(trace="t.json")),
        ({"schedule": "1f1b", "placement": "linear"}, PulseConfig(schedule="1f1b", placement="linear")),
    ],
)
def test_what_a_block_means(block: object, expected: PulseConfig | None) -> None:
    assert parse_pulse(block) == expected


def test_every_key_has_a_default_and_is_documented_for_errors() -> None:
    for name, field in PulseConfig.model_fields.items():
        assert not field.is_required() and field.description, name


def test_no_search_outlasts_the_patience_of_other_ranks() -> None:
    assert parse_pulse({"solver_seconds": 300}) == PulseConfig(solver_seconds=300.0)
    assert parse_pulse({"solver_seconds": 150, "timeout_seconds": 5}) is not None
    with pytest.raises(ConfigError, match=r"'solver_seconds': expected at most 150, half .* found 151; .*timeout_sec"):
        parse_pulse({"solver_seconds": 151, "timeout_seconds": 5})


@pytest.mark.parametrize("block", ["on", 1, [], [("waves", 1)]])
def test_a_block_is_an_object_or_a_flag(block: object) -> None:
    with pytest.raises(ConfigError, match=r"expected an object, true or false, found") as caught:
        parse_pulse(block)
    assert repr(block) in str(caught.value)


FLAG, COUNT, PATH = "true or false", "an integer from 1 to 1000", '"auto" or a path'
MEMORY = '"auto" or a number > 0 and at most 1e15'
SOLVER, TIMEOUT = "a finite number >= 0", "a number > 0 and at most 1e7"
BUFFER = "an integer from 1 to 65536, or null"
WRONG = [
    *[("enabled", value, FLAG) for value in (1, "true", None)],
    *[("placement", value, '"auto", "wave", "linear" or "loop"') for value in ("waves", None, 1, ["wave"])],
    *[("waves", value, COUNT) for value in (0, -1, True, "2", 1.0, 2.5, None, 10**30, math.nan)],
    *[("schedule", value, "one of auto, gpipe, 1f1b") for value in ("wav", "1F1B", 3, None, "")],
    *[("split_backward", value, '"auto", true or false') for value in ("no", 0, None)],
    *[("profile", value, PATH) for value in (3, None, "", True)],
    *[("cluster", value, '"auto", a path or a name as a100:8x8') for value in (3, None, "", {})],
    *[(name, value, "a path or null") for name in ("plan", "plan_cache", "trace") for value in (3, True, "")],
    *[("memory_gb", value, MEMORY) for value in (0, -1, True, "3", "lots", math.nan, math.inf, None)],
    *[("solver_seconds", value, SOLVER) for value in (-1, True, "3", math.nan, math.inf)],
    *[("trace_steps", value, "a step n >= 1") for value in (0, True, "3", [], [0], [1.5], ["3"], [1] * 21)],
    *[("receive_ahead", value, "true or false") for value in ("auto", 1, None)],
    *[("hccl_buffer_size", value, BUFFER) for value in (0, -1, True, "16", 16.0, 65537)],
    *[("nccl_high_priority_stream", value, FLAG) for value in (1, "true", None)],
    *[("timeout_seconds", value, TIMEOUT) for value in (0, -1, True, "5", math.nan, math.inf, 1e30)],
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG)
def test_a_wrong_value_is_named_with_what_was_expected(key: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pulse({key: value})
    assert str(caught.value).startswith(f'the "pulse" block: key {key!r}: expected {expected}')
    assert str(caught.value).endswith(f"found {value!r}")


@pytest.mark.parametrize(
    ("key", "meant"), [("wavs", "waves"), ("Waves", "waves"), ("memory", "memory_gb"), ("timeout", "timeout_seconds")]
)
def test_an_unknown_key_is_named_with_the_one_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pulse({key: 1})
    assert f"unknown key {key!r}" in str(caught.value) and f'did you mean "{meant}"?' in str(caught.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pulse({"wavs": 1, "placement": "ring", "memory_gb": 0})
    assert all(word in str(caught.value) for word in ("'wavs'", "'placement'", "'memory_gb'"))


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_pulse({1: 2})


def test_steps_to_trace_need_somewhere_to_write_to() -> None:
    assert parse_pulse({"trace": "t.json", "trace_steps": [3, 100]}).trace_steps == [3, 100]
    assert parse_pulse({"trace": "t.json", "trace_steps": 50}).trace_steps == 50
    with pytest.raises(ConfigError, match="key 'trace_steps': expected \"trace\" beside it"):
        parse_pulse({"trace_steps": 50})
