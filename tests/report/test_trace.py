"""Traces that Perfetto opens: events well formed, every arrow with both ends inside a box."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.report.trace import write_trace


def trace_of(timeline: Timeline, sample: Any, folder: Path) -> dict[str, Any]:
    write_trace(folder / "trace.json", [("", timeline)], sample.plan.placement)
    return dict(json.loads((folder / "trace.json").read_text()))


def by_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_complete_event_an_action(sample: Any, tmp_path: Path) -> None:
    boxes = by_phase(trace_of(sample.timeline, sample, tmp_path), "X")
    assert Counter(box["name"] for box in boxes) == Counter(str(a) for row in sample.plan.schedule for a in row)
    first = next(box for box in boxes if box["name"] == "0F0")
    assert (first["pid"], first["ts"], first["dur"], first["cat"]) == (0, 0.0, 1000.0, "forward")


def test_every_message_is_an_arrow_between_two_boxes(sample: Any, tmp_path: Path) -> None:
    trace = trace_of(sample.timeline, sample, tmp_path)
    starts = {event["id"]: event for event in by_phase(trace, "s")}
    ends = {event["id"]: event for event in by_phase(trace, "f")}
    assert len(starts) == len(ends) == len(sample.timeline.transfers)
    assert starts.keys() == ends.keys()
    for flow_id, start in starts.items():
        end = ends[flow_id]
        assert start["ts"] < end["ts"]
        assert start["pid"] != end["pid"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        for event in (start, end):
            assert any(
                box["pid"] == event["pid"] and box["ts"] < event["ts"] < box["ts"] + box["dur"]
                for box in by_phase(trace, "X")
            )


def test_memory_is_a_counter_a_rank(sample: Any, tmp_path: Path) -> None:
    counters = by_phase(trace_of(sample.timeline, sample, tmp_path), "C")
    assert {event["pid"] for event in counters} == {0, 1, 2, 3}
    assert len(counters) == sum(len(row) for row in sample.timeline.memory)


def test_arrows_of_actions_that_were_not_measured_are_left_out(sample: Any, tmp_path: Path) -> None:
    partial = dataclasses.replace(sample.timeline, spans=sample.timeline.spans_of(0))
    assert by_phase(trace_of(partial, sample, tmp_path), "s") == []


def test_two_timelines_have_processes_of_their_own(sample: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [("planned", sample.timeline), ("measured", sample.timeline)], sample.plan.placement)
    trace = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in by_phase(trace, "M") if event["name"] == "process_name"}
    assert names[0] == "planned rank 0 (stages 0, 7)"
    assert names[7] == "measured rank 3 (stages 3, 4)"
    ids = Counter(event["id"] for event in by_phase(trace, "s"))
    assert set(ids.values()) == {1}
