"""Timelines as a picture: a lane a rank, time to the right, several timelines above each other.

Forward is light, backward is dark and hatched, so the picture reads in black and white too. A rank's second stage (on
the way up the V) has another hue than its first, and a bar at the foot of its boxes. Frozen work is cross-hatched,
input gradients are hatched the other way than whole backwards, extra forwards upright.
Of several backbones the second and later have a bar at the head of their boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.timeline import AnySpan, Timeline
from deepspeed_pulse.report.spans import FROZEN, STYLE, WORDS, Kind, backbone, kind, kinds, named_backbones
from deepspeed_pulse.report.words import summary

_LANE = 0.84
_FOOT = 0.10
_MAX_MESSAGES = 1000
_LEGEND_INCHES = 3.2
"""Width of the longest entry of the legend."""

_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))
"""Of neighbouring ranks' memory, so that the curves differ without colour."""

_FONT_POINTS = 7.0
_STAGES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Look:
    """Colours of one kind of box."""

    face: str
    ink: str
    edge: str
    hatch: str = ""
    foot: str = ""


_LOOKS = {
    Kind("F", 0): _Look("#cfe3f7", "#10304d", "#7fa3c4"),
    Kind("F", 1): _Look("#bfe8d2", "#0f3d26", "#74b392", foot="#0f3d26"),
    Kind("B", 0): _Look("#2f6db0", "#ffffff", "#5f93ca", "////"),
    Kind("B", 1): _Look("#1f7f4f", "#ffffff", "#55a67d", "////", "#bfe8d2"),
    Kind("I", 0): _Look("#2f6db0", "#ffffff", "#5f93ca", "\\\\\\\\"),
    Kind("I", 1): _Look("#1f7f4f", "#ffffff", "#55a67d", "\\\\\\\\", "#bfe8d2"),
    Kind("W", 0): _Look("#8d8d8d", "#ffffff", "#b5b5b5", "...."),
    Kind("W", 1): _Look("#6f6f6f", "#ffffff", "#9a9a9a", "....", "#dddddd"),
    Kind("E", 0): _Look("#e9e3f5", "#33235c", "#a695cc", "|||"),
    Kind("E", 1): _Look("#d6cbee", "#33235c", "#8f7bbf", "|||", "#33235c"),
    Kind(FROZEN, 0): _Look("#f6d58e", "#4d3800", "#c79a35", "xx"),
}
_MESSAGE_INK = "#c2452d"
_HEAD = 0.16
_HEADS = ("#1a1a1a", "#f2a900", "#9a5fc0")
"""Bars of the second, third, fourth backbone, and again: of different brightness, so that they differ in grey."""


def draw_timelines(
    rows: Sequence[tuple[str, Timeline]],
    placement: Placement,
    path: str | Path,
    *,
    memory: bool = False,
    backbones: Sequence[str] = (),
) -> None:
    """Write one picture of several timelines that share the time axis, for example planned above measured.

    ``rows``: title and timeline of each. ``placement``: rank of each stage, for all rows. ``path``: ``.png``, ``.svg``
    or ``.pdf``, by its suffix. ``memory``: draw each rank's live bytes under the timelines that have them.
    ``backbones``: their names, where there are several.
    """
    with matplotlib.rc_context(STYLE):
        timelines_figure(rows, placement, memory=memory, backbones=backbones).savefig(path, dpi=110)


def timelines_figure(
    rows: Sequence[tuple[str, Timeline]],
    placement: Placement,
    *,
    memory: bool = False,
    backbones: Sequence[str] = (),
) -> Figure:
    """The picture of :func:`draw_timelines`, not yet written."""
    width, heights = _size(rows, memory)
    handles = [*_legend([timeline for _, timeline in rows], placement), *_owners(placement, backbones)]
    columns = min(len(handles), int(width / _LEGEND_INCHES))
    legend_rows = math.ceil(len(handles) / columns)
    figure = Figure(figsize=(width, sum(heights) + 0.55 + 0.2 * legend_rows), layout="constrained")
    all_axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max(timeline.makespan_ms for _, timeline in rows) or 1.0
    remaining = iter(all_axes)
    for title, timeline in rows:
        axes = next(remaining)
        axes.set_title(f"{title}: {summary(timeline)}" if title else summary(timeline), loc="left", fontsize=10)
        _draw_lanes(axes, timeline, placement, points_per_ms=72 * (width - 1.2) / end)
        if memory and timeline.memory:
            _draw_memory(next(remaining), timeline)
    all_axes[-1].set_xlabel("ms")
    all_axes[-1].set_xlim(-0.003 * end, 1.003 * end)
    figure.legend(handles=handles, loc="outside lower right", ncols=columns, frameon=False, fontsize=8)
    return figure


def _size(rows: Sequence[tuple[str, Timeline]], memory: bool) -> tuple[float, list[float]]:
    """Width, and the height of each part, in inches: as wide as the busiest timeline needs for its numbers."""
    actions = max(len(timeline.spans_of(rank)) for _, timeline in rows for rank in range(timeline.num_ranks))
    heights = []
    for _, timeline in rows:
        heights.append(0.4 * timeline.num_ranks + 0.35)
        if memory and timeline.memory:
            heights.append(max(1.4, 0.18 * timeline.num_ranks))
    return min(max(11.0, 0.24 * actions + 3), 26.0), heights


def _draw_lanes(axes: Axes, timeline: Timeline, placement: Placement, *, points_per_ms: float) -> None:
    start = timeline.start_ms
    groups: dict[Kind, list[AnySpan]] = {}
    owned: dict[int, list[AnySpan]] = {}
    for span in timeline.every_span:
        groups.setdefault(kind(span, placement), []).append(span)
        owned.setdefault(backbone(span, placement) or 0, []).append(span)
    for key, spans in groups.items():
        _draw_boxes(axes, spans, _LOOKS[key], start)
        for span in spans:
            _draw_number(axes, span, _LOOKS[key].ink, start, points_per_ms)
    for owner, spans in owned.items():
        if owner:
            _draw_heads(axes, spans, _HEADS[(owner - 1) % len(_HEADS)], start)
    if len(timeline.transfers) <= _MAX_MESSAGES:
        _draw_messages(axes, timeline, start)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [lane_name(placement, rank) for rank in range(timeline.num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def lane_name(placement: Placement, rank: int) -> str:
    """A rank and its stages on two lines; of many the first and the last."""
    stages = list(map(str, placement.stages_of(rank)))
    shown = stages if len(stages) <= _STAGES_SHOWN else [*stages[:2], "..", stages[-1]]
    return f"rank {rank}\nstage{'s' if len(stages) > 1 else ''} {', '.join(shown)}"


def _draw_boxes(axes: Axes, spans: Sequence[AnySpan], look: _Look, start: float) -> None:
    boxes = [Rectangle((s.start_ms - start, s.rank - _LANE / 2), s.end_ms - s.start_ms, _LANE) for s in spans]
    axes.add_collection(
        PatchCollection(boxes, facecolor=look.face, edgecolor=look.edge, hatch=look.hatch or None, linewidth=0.4)
    )
    axes.add_collection(PatchCollection(boxes, facecolor="none", edgecolor="#ffffff", linewidth=0.9))
    if look.foot:
        feet = [Rectangle((b.get_x(), b.get_y() + _LANE - _FOOT), b.get_width(), _FOOT) for b in boxes]
        axes.add_collection(PatchCollection(feet, facecolor=look.foot, linewidth=0))


def _draw_heads(axes: Axes, spans: Sequence[AnySpan], colour: str, start: float) -> None:
    bars = [Rectangle((s.start_ms - start, s.rank - _LANE / 2), s.end_ms - s.start_ms, _HEAD) for s in spans]
    axes.add_collection(PatchCollection(bars, facecolor=colour, edgecolor="#ffffff", linewidth=0.6, zorder=2))


def _owners(placement: Placement, names: Sequence[str]) -> list[Patch]:
    """Of the legend: each of several backbones."""
    found = []
    for index, name in enumerate(named_backbones(placement, names)):
        colour = _HEADS[(index - 1) % len(_HEADS)] if index else "none"
        found.append(Patch(facecolor=colour, edgecolor="#888888", label=f"{name}{', bar above' if index else ''}"))
    return found


def _draw_number(axes: Axes, span: AnySpan, ink: str, start: float, points_per_ms: float) -> None:
    text = str(span.work.microbatch)
    room = (span.end_ms - span.start_ms) * points_per_ms - 1
    size = min(_FONT_POINTS, room / (0.66 * len(text)))
    if size >= 4:
        middle = (span.start_ms + span.end_ms) / 2 - start
        axes.text(middle, span.rank, text, ha="center", va="center", color=ink, fontsize=size, clip_on=True)


def _draw_messages(axes: Axes, timeline: Timeline, start: float) -> None:
    """A thin line from the sender's lane when the message leaves to the receiver's when it arrives."""
    lines = []
    for sent in timeline.every_transfer:
        down = math.copysign(_LANE / 2, sent.target_rank - sent.source_rank)
        leaves = (sent.leave_ms - start, sent.source_rank + down)
        lines.append([leaves, (sent.arrive_ms - start, sent.target_rank - down)])
    axes.add_collection(LineCollection(lines, colors=_MESSAGE_INK, linewidths=0.8, zorder=3))


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    colours = matplotlib.colormaps["viridis"]
    for rank, changes in enumerate(timeline.memory):
        shade = colours(0.9 * rank / max(timeline.num_ranks - 1, 1))
        times, sizes = [ms for ms, _ in changes], [num_bytes / 1e9 for _, num_bytes in changes]
        dashes = _DASHES[rank % len(_DASHES)]
        axes.step(times, sizes, where="post", color=shade, linestyle=dashes, linewidth=1, label=f"rank {rank}")
    axes.set(ylabel="live GB", ylim=(0, None))
    axes.set_title("memory beside weights, gradients and optimizer state", loc="left", fontsize=9)
    axes.legend(ncols=1, fontsize=7, handlelength=3, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _legend(timelines: Sequence[Timeline], placement: Placement) -> list[Patch]:
    used = kinds(timelines, placement)
    several = max(len(part.stages_of(rank)) for part in placement.parts for rank in set(part))
    ways = ("first stage of a rank", "second stage of a rank (bar below)")
    if several > 2:
        ways = ("1st, 3rd, .. stage of a rank", "2nd, 4th, .. stage of a rank (bar below)")
    handles = [Patch(facecolor="none", edgecolor="none", label="number: its microbatch")]
    for key, look in _LOOKS.items():
        if key in used:
            label = WORDS[key.letter] + (f", {ways[key.way]}" if several > 1 and key.letter != FROZEN else "")
            handles.append(Patch(facecolor=look.face, edgecolor=look.edge, hatch=look.hatch or None, label=label))
    if any(0 < len(timeline.transfers) <= _MAX_MESSAGES for timeline in timelines):
        handles.append(Patch(facecolor=_MESSAGE_INK, label="message"))
    return handles
