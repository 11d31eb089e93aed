"""Timelines in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process a rank, a complete event an action, an arrow a message, and a counter for memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_pulse.ir.fill import FrozenRun
from deepspeed_pulse.ir.keys import key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import GIVEN_BY, Action, Direction
from deepspeed_pulse.ir.timeline import AnySpan, Span, Timeline
from deepspeed_pulse.report.spans import FROZEN, WORDS, backbone, kind

Event = dict[str, Any]

_COLOURS = {"F": "good", "B": "bad", "I": "bad", "W": "terrible", "E": "olive", FROZEN: "yellow"}


def write_trace(
    path: str | Path, rows: Sequence[tuple[str, Timeline]], placement: Placement, *, backbones: Sequence[str] = ()
) -> None:
    """Write named timelines into one trace, each with processes of its own (``measured rank 0``).

    ``backbones``: their names, where there are several; each action says whose it is.
    """
    events: list[Event] = []
    pid = 0
    for name, timeline in rows:
        events += _events(timeline, placement, name, pid, backbones)
        pid += timeline.num_ranks
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def _events(
    timeline: Timeline, placement: Placement, name: str, first_pid: int, backbones: Sequence[str]
) -> Iterator[Event]:
    for rank in range(timeline.num_ranks):
        pid = first_pid + rank
        stages = ", ".join(map(str, placement.stages_of(rank)))
        yield _metadata("process_name", pid, name=f"{name} rank {rank} (stages {stages})".strip())
        yield _metadata("process_sort_index", pid, sort_index=pid)
        yield _metadata("thread_name", pid, name="compute")
    yield from (_complete(span, first_pid, placement, backbones) for span in timeline.every_span)
    yield from _flows(timeline, first_pid, placement)
    yield from _hand_overs(timeline, first_pid)
    for rank, changes in enumerate(timeline.memory):
        for ms, num_bytes in changes:
            counter = {"ph": "C", "pid": first_pid + rank, "tid": 0, "ts": _us(ms), "name": "live beside the state"}
            yield {**counter, "args": {"bytes": num_bytes}}


def _metadata(kind: str, pid: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": args}


def _complete(span: AnySpan, first_pid: int, placement: Placement, backbones: Sequence[str]) -> Event:
    letter, work, owner = kind(span, placement).letter, span.work, backbone(span, placement)
    if isinstance(work, FrozenRun):
        what: Event = {"part": work.part, "layers": f"{work.first}-{work.end - 1}"}
    else:
        what = {"stage": work.stage}
        if owner is not None:
            what["backbone"] = backbones[owner] if backbones else owner
    event = _lasting(str(work), WORDS[letter], first_pid + span.rank, 0, span.start_ms, span.end_ms)
    return {**event, "cname": _COLOURS[letter], "args": {**what, "microbatch": work.microbatch}}


def _lasting(name: str, category: str, pid: int, tid: int, start_ms: float, end_ms: float) -> Event:
    times = {"ts": _us(start_ms), "dur": _us(end_ms - start_ms)}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def _hand_overs(timeline: Timeline, first_pid: int) -> Iterator[Event]:
    """On its way, a frozen result is an event beside the sender's actions."""
    for carried in timeline.carried:
        pid, category = first_pid + carried.source_rank, "frozen result on its way"
        event = _lasting(str(carried.message), category, pid, 1, carried.leave_ms, carried.arrive_ms)
        yield {**event, "args": {"bytes": carried.num_bytes, "to rank": carried.target_rank}}


def _flows(timeline: Timeline, first_pid: int, placement: Placement) -> Iterator[Event]:
    """An arrow from the end of a message's producer to the start of its consumer."""
    spans = {key_of(span.work): span for span in timeline.spans}
    for index, transfer in enumerate(timeline.transfers):
        message = transfer.message
        gives = GIVEN_BY[message.direction]
        producer = spans.get((message.source_stage, gives, message.microbatch))
        last = message.direction is Direction.EXTRA and placement.after(message.source_stage) is None
        consumer = spans.get((message.target_stage, "F" if last else gives, message.microbatch))
        if producer is None or consumer is None:
            continue
        figures = {"bytes": transfer.num_bytes, "leave_ms": transfer.leave_ms, "arrive_ms": transfer.arrive_ms}
        flow = {"name": message.label, "cat": "message", "id": f"{first_pid}.{index}", "tid": 0}
        flow["args"] = {**figures, "microbatch": message.microbatch}
        yield {**flow, "ph": "s", "pid": first_pid + producer.rank, "ts": _us(_inside(producer, 0.99))}
        yield {**flow, "ph": "f", "bp": "e", "pid": first_pid + consumer.rank, "ts": _us(_inside(consumer, 0.01))}


def _inside(span: Span[Action], share: float) -> float:
    """A moment within a span: viewers tie an arrow to the box around its time, ends excluded."""
    return span.start_ms + share * (span.end_ms - span.start_ms)


def _us(ms: float) -> float:
    return round(ms * 1000, 3)
