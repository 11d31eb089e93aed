"""What runs on ranks and goes between them, as every picture draws it: actions and frozen work alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from deepspeed_pulse.ir.fill import FrozenRun
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.timeline import AnySpan, Timeline

Box = AnySpan

FROZEN = "E"
"""The letter of frozen work, beside those of operations."""

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    FROZEN: "frozen, for the next step",
}
"""By letter, in the order of legends."""


class Kind(NamedTuple):
    """``way``: 0 for a rank's first, third, ... stage (down the V) and for frozen work, 1 for its second (up)."""

    letter: str
    way: int


class Arrow(NamedTuple):
    """A message, or a frozen result, on its way between ranks; ms."""

    source_rank: int
    target_rank: int
    leave_ms: float
    arrive_ms: float


def boxes(timeline: Timeline) -> tuple[Box, ...]:
    """Of all ranks."""
    return timeline.every_span


def boxes_of(timeline: Timeline, rank: int) -> list[Box]:
    """In time order."""
    return sorted((b for b in boxes(timeline) if b.rank == rank), key=lambda box: (box.start_ms, box.end_ms))


def kind(box: Box, placement: Placement) -> Kind:
    if isinstance(box.work, FrozenRun):
        return Kind(FROZEN, 0)
    way = placement.stages_of(box.rank).index(box.work.stage) % 2
    return Kind(box.work.op.value, way)


def kinds(timelines: Sequence[Timeline], placement: Placement) -> set[Kind]:
    """Those that occur."""
    return {kind(box, placement) for timeline in timelines for box in boxes(timeline)}


def text(box: Box) -> str:
    """``2F0``, ``latents[0:5]@3``."""
    return str(box.work)


def microbatch(box: Box) -> int:
    return box.work.microbatch


def details(box: Box) -> dict[str, Any]:
    """What a box is of, by name."""
    if isinstance(box.work, FrozenRun):
        run = box.work
        return {"part": run.part, "layers": f"{run.first}-{run.end - 1}", "microbatch": run.microbatch}
    return {"stage": box.work.stage, "microbatch": box.work.microbatch}


def arrows(timeline: Timeline) -> list[Arrow]:
    sent = [Arrow(t.source_rank, t.target_rank, t.leave_ms, t.arrive_ms) for t in timeline.transfers]
    return sent + [Arrow(c.source_rank, c.target_rank, c.leave_ms, c.arrive_ms) for c in timeline.carried]
