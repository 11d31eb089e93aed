"""A timeline as a coloured grid in the terminal: one lane a rank, time to the right.

Each action is as wide as it is long and begins with its text (``2F0``, or what fits of it). The rest of it is filled
with ``>`` for forward and ``<`` for backward, ``(`` and ``~`` for its input and weight halves, so that it reads without
colour; ``E3=`` is frozen work for microbatch 3 of the next step, a dot is idle time. Long timelines continue below::

    rank 0  0F0>0F1>0F2>............3F0>....3B0<<<<<0B0<<<<<
    rank 1  ....1F0>1F1>2F0>2F1>2B0<<<<<1B0<<<<<............

Of several backbones each has fills and shades of its own: the second ``}`` and ``{``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.timeline import AnySpan, Timeline
from deepspeed_pulse.report.spans import FROZEN, WORDS, backbone, kind, kinds, named_backbones
from deepspeed_pulse.report.words import summary

IDLE = "."
_FILL = {"F": ">", "B": "<", "I": "(", "W": "~", "E": "-", FROZEN: "="}
_OTHER_FILLS = ({"F": "}", "B": "{"}, {"F": "]", "B": "["}, {"F": "/", "B": "\\"})
"""Of the second, third, fourth backbone, and again."""

_OTHER_STYLES = (
    {"F": "black on plum2", "B": "bright_white on purple4", "I": "bright_white on purple4"},
    {"F": "black on khaki1", "B": "bright_white on orange4", "I": "bright_white on orange4"},
    {"F": "black on grey82", "B": "bright_white on grey30", "I": "bright_white on grey30"},
)
_STYLES = {
    "F": ("black on bright_cyan", "black on cyan"),
    "B": ("bright_white on dark_orange3", "bright_white on dark_red"),
    "I": ("bright_white on dark_orange3", "bright_white on dark_red"),
    "W": ("black on green", "black on dark_sea_green"),
    "E": ("black on bright_white", "black on white"),
    FROZEN: ("black on yellow",),
}
_IDLE_STYLE = "dim"
_MAX_LINES = 70
_CELL_WIDTHS = (5, 4, 3, 2, 1)
"""Columns of a short action, widest first; the first that needs few enough bands is taken."""


def schedule_grid(timeline: Timeline, placement: Placement, *, width: int = 100, backbones: Sequence[str] = ()) -> Text:
    """The grid, ``width`` columns wide, as something rich prints; ``str()`` of it is the plain form.

    ``placement``: rank of each stage; a rank's first and second stage get different shades. ``backbones``: their names.
    """
    lines = [Text(summary(timeline)), *_bands(timeline, placement, width), *_legend(timeline, placement, width)]
    lines += _owners(placement, backbones)
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
        marks = "".join(f"|{column * ms_per_column:.4g} ms".ljust(20) for column in range(left, right, 20))
        yield Text(" " * margin + marks[: max(right - left, 12)].rstrip(), style="dim")
        for label, lane in zip(labels, lanes, strict=True):
            yield Text(label.ljust(margin)) + lane[left:right]


def _ms_per_column(timeline: Timeline, room: int) -> float:
    """As fine as fits into a screen or two: a short action gets 5 columns, or 4, 3, 2, 1."""
    max_columns = max(_MAX_LINES // (timeline.num_ranks + 1), 1) * room
    durations = sorted(span.end_ms - span.start_ms for span in timeline.spans if span.end_ms > span.start_ms)
    if not durations:
        return 1.0
    short = durations[len(durations) // 10]
    fitting = (short / cell for cell in _CELL_WIDTHS if timeline.makespan_ms * cell / short <= max_columns)
    return next(fitting, timeline.makespan_ms / max_columns)


def _lane(
    timeline: Timeline, placement: Placement, rank: int, start: float, ms_per_column: float, columns: int
) -> Text:
    """All columns of one rank."""
    lane, at = Text(), 0
    mine = (span for span in timeline.every_span if span.rank == rank)
    for span in sorted(mine, key=lambda span: (span.start_ms, span.end_ms)):
        letter, way = kind(span, placement)
        left, right = (round((ms - start) / ms_per_column) for ms in (span.start_ms, span.end_ms))
        left = max(left, at)
        if right > left:
            lane.append(IDLE * (left - at), style=_IDLE_STYLE)
            fill, style = _look(letter, way, backbone(span, placement))
            lane.append(_cell(span, letter, right - left, fill), style=style)
            at = right
    lane.append(IDLE * (columns - at), style=_IDLE_STYLE)
    return lane


def _look(letter: str, way: int, owner: int | None) -> tuple[str, str]:
    """Fill and style."""
    fill, style = _FILL[letter], _STYLES[letter][way]
    if not owner:
        return fill, style
    other = (owner - 1) % len(_OTHER_FILLS)
    return _OTHER_FILLS[other].get(letter, fill), _OTHER_STYLES[other].get(letter, style)


def _owners(placement: Placement, names: Sequence[str]) -> Iterator[Text]:
    """A line for each of several backbones."""
    for index, name in enumerate(named_backbones(placement, names)):
        line = Text("  ")
        for letter in "FB":
            fill, style = _look(letter, 0, index)
            line.append(letter + fill, style=style).append(" ")
        yield line.append(name)


def _cell(span: AnySpan, letter: str, width: int, fill: str) -> str:
    """The action's text where it leaves room for a fill, else less of it, else without a fill."""
    short = (f"{letter}{span.work.microbatch}", letter)
    labels = short if letter == FROZEN else (str(span.work), *short)
    fitting = [text for room in (width - 1, width) for text in labels if len(text) <= room]
    return fitting[0].ljust(width, fill)


def _legend(timeline: Timeline, placement: Placement, width: int) -> Iterator[Text]:
    """As many lines as it takes."""
    used = {kind.letter for kind in kinds([timeline], placement)}
    parts = [(f"{letter}{_FILL[letter]}", _STYLES[letter][0], WORDS[letter]) for letter in WORDS if letter in used]
    line = Text("STAGE OP MICROBATCH: ", style="dim")
    for sign, style, what in (*parts, (IDLE, "", "idle")):
        entry = Text().append(sign, style=style).append(f" {what}  ")
        if len(line) + len(entry) - 2 > width:
            yield line
            line = Text("  ", style="dim")
        line.append_text(entry)
    line.rstrip()
    yield line
