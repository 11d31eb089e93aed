"""Unit costs draw a plan whose profile is not at hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepspeed_pulse.ir.plan import Route
from deepspeed_pulse.planner import simulate
from deepspeed_pulse.report.units import with_unit_costs


def test_a_stage_takes_one_forward_and_two_backward(sample: Any) -> None:
    timeline = simulate(*with_unit_costs(dataclasses.replace(sample.plan, boundaries=(0, 1, 4, 5, 6, 9, 20, 21, 30))))
    durations = {(s.work.op.value, round(s.end_ms - s.start_ms, 9)) for s in timeline.spans}
    assert durations == {("F", 1.0), ("B", 2.0)}
    assert timeline.makespan_ms >= 57 - 1e-9


def test_values_that_are_sent_are_drawn_and_local_ones_are_not(sample: Any) -> None:
    routes = (Route(name="temb", source_stage=0, hops=((0, 1), (1, 2))), Route(name="skip", source_stage=1))
    timeline = simulate(*with_unit_costs(dataclasses.replace(sample.plan, routes=routes)))
    assert {t.message.name for t in timeline.transfers} == {"", "temb"}
