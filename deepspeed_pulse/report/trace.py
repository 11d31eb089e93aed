"""Timelines in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process a rank, a complete event an action, an arrow a message, and a counter for memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.program import Message
from deepspeed_pulse.ir.schedule import Action, Direction, Op
from deepspeed_pulse.ir.timeline import Span, Timeline, Transfer
from deepspeed_pulse.report.spans import FROZEN, WORDS, Box, boxes, details, kind, text

Event = dict[str, Any]

_COLOURS = {"F": "good", "B": "bad", "I": "bad", "W": "terrible", FROZEN: "yellow"}
_BACKWARD_OPS = (Op.BACKWARD, Op.INPUT_GRAD)


def write_trace(path: str | Path, rows: Sequence[tuple[str, Timeline]], placement: Placement) -> None:
    """Write named timelines into one trace, each with processes of its own (``measured rank 0``)."""
    Path(path).write_text(json.dumps(_trace(rows, placement)) + "\n", encoding="utf-8")


def _trace(rows: Sequence[tuple[str, Timeline]], placement: Placement) -> Event:
    events: list[Event] = []
    pid = 0
    for name, timeline in rows:
        events += _events(timeline, placement, name, pid)
        pid += timeline.num_ranks
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(timeline: Timeline, placement: Placement, name: str, first_pid: int) -> Iterator[Event]:
    for rank in range(timeline.num_ranks):
        pid = first_pid + rank
        stages = ", ".join(str(stage) for stage, owner in enumerate(placement) if owner == rank)
        yield _metadata("process_name", pid, name=f"{name} rank {rank} (stages {stages})".strip())
        yield _metadata("process_sort_index", pid, sort_index=pid)
        yield _metadata("thread_name", pid, name="compute")
    yield from (_complete(box, first_pid, placement) for box in boxes(timeline))
    yield from _flows(timeline, first_pid)
    yield from _hand_overs(timeline, first_pid)
    for rank, changes in enumerate(timeline.memory):
        for ms, num_bytes in changes:
            counter = {"ph": "C", "pid": first_pid + rank, "tid": 0, "ts": _us(ms), "name": "live beside the state"}
            yield {**counter, "args": {"bytes": num_bytes}}


def _metadata(kind: str, pid: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": args}


def _complete(box: Box, first_pid: int, placement: Placement) -> Event:
    letter = kind(box, placement).letter
    return {
        "ph": "X",
        "name": text(box),
        "cat": WORDS[letter],
        "pid": first_pid + box.rank,
        "tid": 0,
        "ts": _us(box.start_ms),
        "dur": _us(box.end_ms - box.start_ms),
        "cname": _COLOURS[letter],
        "args": details(box),
    }


def _hand_overs(timeline: Timeline, first_pid: int) -> Iterator[Event]:
    """On its way, a frozen result is an event beside the sender's actions."""
    for carried in timeline.carried:
        yield {
            "ph": "X",
            "name": str(carried.message),
            "cat": "frozen result on its way",
            "pid": first_pid + carried.source_rank,
            "tid": 1,
            "ts": _us(carried.leave_ms),
            "dur": _us(carried.arrive_ms - carried.leave_ms),
            "args": {"bytes": carried.num_bytes, "to rank": carried.target_rank},
        }


def _flows(timeline: Timeline, first_pid: int) -> Iterator[Event]:
    """An arrow from the end of a message's producer to the start of its consumer."""
    spans = {(s.work.stage, s.work.microbatch, s.work.op in _BACKWARD_OPS): s for s in _ends(timeline)}
    for index, transfer in enumerate(timeline.transfers):
        message = transfer.message
        backward = message.direction is Direction.BACKWARD
        producer = spans.get((message.source_stage, message.microbatch, backward))
        consumer = spans.get((message.target_stage, message.microbatch, backward))
        if producer is None or consumer is None:
            continue
        flow = _flow(transfer, message, f"{first_pid}.{index}")
        yield {**flow, "ph": "s", "pid": first_pid + producer.rank, "ts": _us(_inside(producer, 0.99))}
        yield {**flow, "ph": "f", "bp": "e", "pid": first_pid + consumer.rank, "ts": _us(_inside(consumer, 0.01))}


def _ends(timeline: Timeline) -> Iterator[Span[Action]]:
    """Spans that a message can start or end at."""
    return (span for span in timeline.spans if span.work.op is not Op.WEIGHT_GRAD)


def _flow(transfer: Transfer[Message], message: Message, flow_id: str) -> Event:
    return {
        "name": message.label,
        "cat": "message",
        "id": flow_id,
        "tid": 0,
        "args": {
            "bytes": transfer.num_bytes,
            "leave_ms": transfer.leave_ms,
            "arrive_ms": transfer.arrive_ms,
            "microbatch": message.microbatch,
        },
    }


def _inside(span: Span[Action], share: float) -> float:
    """A moment within a span: viewers tie an arrow to the box around its time, ends excluded."""
    return span.start_ms + share * (span.end_ms - span.start_ms)


def _us(ms: float) -> float:
    return round(ms * 1000, 3)
