"""A timeline as a coloured grid in the terminal: one lane a rank, time to the right.

Each action is as wide as it is long and begins with its text (``2F0``, or what fits of it). The
rest of it is filled with ``>`` for forward and ``<`` for backward, ``(`` and ``~`` for its input and
weight halves, so that it reads without colour; ``E3=`` is frozen work for microbatch 3 of the next
step, a dot is idle time. Long timelines continue in further bands below::

    rank 0  0F0>0F1>0F2>............3F0>....3B0<<<<<0B0<<<<<
    rank 1  ....1F0>1F1>2F0>2F1>2B0<<<<<1B0<<<<<............
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import Action, Op
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.report.words import OPS, summary

IDLE = "."
_FILL = {Op.FORWARD: ">", Op.BACKWARD: "<", Op.INPUT_GRAD: "(", Op.WEIGHT_GRAD: "~"}
_STYLES = {
    Op.FORWARD: ("black on bright_cyan", "black on cyan"),
    Op.BACKWARD: ("bright_white on dark_orange3", "bright_white on dark_red"),
    Op.INPUT_GRAD: ("bright_white on dark_orange3", "bright_white on dark_red"),
    Op.WEIGHT_GRAD: ("black on green", "black on dark_sea_green"),
}
_FROZEN_FILL, _FROZEN_STYLE = "=", "black on yellow"
_IDLE_STYLE = "dim"
_MAX_LINES = 70
_CELL_WIDTHS = (5, 4, 3, 2, 1)
"""Columns of a short action, widest first; the first that needs few enough bands is taken."""


def schedule_grid(timeline: Timeline, placement: Sequence[int], *, width: int = 100) -> Text:
    """The grid as something rich prints; ``str()`` of it is the plain form.

    Args:
        placement: rank of each stage; a rank's first and second stage get different shades.
        width: columns there are.
    """
    lines = [Text(summary(timeline)), *_bands(timeline, Placement(placement), width), *_legend(timeline, width)]
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _bands(timeline: Timeline, placement: Placement, width: int) -> Iterator[Text]:
    labels = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    margin = max(len(label) for label in labels) + 2
    room = max(width - margin, 20)
    start = timeline.start_ms
    ms_per_column = _ms_per_column(timeline, room)
    columns = max(1, math.ceil(round(timeline.makespan_ms / ms_per_column, 6)))
    lanes = [_lane(timeline, placement, rank, start, ms_per_column, columns) for rank in range(timeline.num_ranks)]
    for left in range(0, columns, room):
        right = min(left + room, columns)
        yield Text(" " * margin + _axis(left, right, ms_per_column), style="dim")
        for label, lane in zip(labels, lanes, strict=True):
            yield Text(label.ljust(margin)) + lane[left:right]


def _ms_per_column(timeline: Timeline, room: int) -> float:
    """As fine as fits into a screen or two: a short action gets 5 columns, or 4, 3, 2, 1."""
    max_columns = max(_MAX_LINES // (timeline.num_ranks + 1), 1) * room
    durations = sorted(span.end_ms - span.start_ms for span in timeline.spans if span.end_ms > span.start_ms)
    if not durations:
        return 1.0
    short = durations[len(durations) // 10]
    for cell in _CELL_WIDTHS:
        if timeline.makespan_ms * cell / short <= max_columns:
            return short / cell
    return timeline.makespan_ms / max_columns


def _lane(
    timeline: Timeline, placement: Placement, rank: int, start: float, ms_per_column: float, columns: int
) -> Text:
    """All columns of one rank."""
    shades = {stage: index % 2 for index, stage in enumerate(placement.stages_of(rank))}
    lane, at = Text(), 0
    cells = [
        (s.start_ms, s.end_ms, _labels(s.action), _FILL[s.action.op], _STYLES[s.action.op][shades[s.action.stage]])
        for s in timeline.spans_of(rank)
    ]
    cells += [
        (s.start_ms, s.end_ms, (f"E{s.run.microbatch}", "E"), _FROZEN_FILL, _FROZEN_STYLE)
        for s in timeline.frozen_of(rank)
    ]
    for start_ms, end_ms, labels, fill, style in sorted(cells, key=lambda cell: cell[:2]):
        left, right = (_column(ms - start, ms_per_column) for ms in (start_ms, end_ms))
        left = max(left, at)
        if right <= left:
            continue
        lane.append(IDLE * (left - at), style=_IDLE_STYLE)
        lane.append(_cell(labels, fill, right - left), style=style)
        at = right
    lane.append(IDLE * (columns - at), style=_IDLE_STYLE)
    return lane


def _column(ms: float, ms_per_column: float) -> int:
    return round(ms / ms_per_column)


def _cell(labels: Sequence[str], fill: str, width: int) -> str:
    """The action's text where it leaves room for a fill, else less of it, else without a fill."""
    fitting = [text for room in (width - 1, width) for text in labels if len(text) <= room]
    return fitting[0].ljust(width, fill)


def _labels(action: Action) -> tuple[str, ...]:
    return (str(action), f"{action.op.value}{action.microbatch}", action.op.value)


def _axis(left: int, right: int, ms_per_column: float) -> str:
    """Times every 20 columns."""
    marks = (f"|{ms:.4g} ms" for ms in (column * ms_per_column for column in range(left, right, 20)))
    return "".join(mark.ljust(20) for mark in marks)[: max(right - left, 12)].rstrip()


def _legend(timeline: Timeline, width: int) -> Iterator[Text]:
    """As many lines as it takes."""
    used = {span.action.op for span in timeline.spans}
    parts = [(f"{op.value}{_FILL[op]}", _STYLES[op][0], OPS[op]) for op in Op if op in used]
    if timeline.frozen:
        parts.append((f"E{_FROZEN_FILL}", _FROZEN_STYLE, "frozen, for the next step"))
    line = Text("STAGE OP MICROBATCH: ", style="dim")
    for sign, style, what in (*parts, (IDLE, "", "idle")):
        entry = Text().append(sign, style=style).append(f" {what}  ")
        if len(line) + len(entry) - 2 > width:
            yield line
            line = Text("  ", style="dim")
        line.append_text(entry)
    line.rstrip()
    yield line
