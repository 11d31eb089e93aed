"""A model as a picture, layer by layer: named values above, times and bytes as bars below, a plan's cuts across them.

A value with one reader is an arc from the layer that stashes it to the layer that pops it; one with several is a line
with a dot for each. What a plan sends to another rank is dashed, or hollow, and red: the picture reads in grey too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile, Value
from deepspeed_pulse.report import words
from deepspeed_pulse.report.spans import STYLE

_FORWARD, _BACKWARD, _BACKWARD_EDGE, _BYTES = "#cfe3f7", "#2f6db0", "#5f93ca", "#8d8d8d"
_STAYS, _TRAVELS = "#3b3b3b", "#c2452d"
_DASHES = (0, (3, 1.2))
_AWAY: dict[str, Any] = {"marker": "o", "markersize": 3.4, "markerfacecolor": "white", "markeredgecolor": _TRAVELS}
_THIN, _THICK = 0.6, 4.5
"""Points: widths of the arcs of the smallest values and, where layers have room, of the largest one."""
_LAYER_INCHES, _MOST_INCHES, _MOST_NAMES = 0.15, 26.0, 160
_RAILS = 12
"""Values with several readers that get a line of their own, the largest first; the rest is counted."""

_LABEL_POINTS = 34.0
_SHADE = 0.16


@dataclass(frozen=True, kw_only=True)
class _Value(Value):
    """``away``: readers that a plan has on another rank than the producer."""

    away: frozenset[int]


def draw_model(profile: Profile, path: str | Path, *, plan: Plan | None = None) -> None:
    """Write the picture: ``.png``, ``.svg`` or ``.pdf``, by the suffix of ``path``.

    ``profile``: layer costs and named values, for one microbatch. ``plan``: whose cuts are drawn; one for its layers.
    """
    with matplotlib.rc_context(STYLE):
        model_figure(profile, plan=plan).savefig(path, dpi=120)


def model_figure(profile: Profile, *, plan: Plan | None = None) -> Figure:
    """The picture of :func:`draw_model`, not yet written."""
    values = [_Value(**vars(value), away=_away(value, plan)) for value in profile.values]
    arcs = [value for value in values if len(value.targets) == 1]
    several = sorted((v for v in values if len(v.targets) > 1), key=lambda v: -v.bytes * len(v.targets))
    rails, rest = several[:_RAILS], several[_RAILS:]
    heights = [2.3 if arcs else 0.5, 0.19 * len(rails) + 0.1, 1.7, 1.1, 1.1]
    width = min(max(9.0, _LAYER_INCHES * profile.num_layers + 2.2), _MOST_INCHES)
    names = [words.shortened(layer.name) for layer in profile.layers]
    below = 0.075 * max(map(len, names)) + 1.2
    figure = Figure(figsize=(width, sum(heights) + below), layout="constrained")
    figure.suptitle(_title(profile, plan), fontsize=10, x=0.01, ha="left", parse_math=False)
    top, lines, times, weights, kept = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    largest = max((value.bytes for value in arcs), default=0)
    room = 72 * (width - 2) / profile.num_layers
    thick = min(max(_THIN, 0.45 * room), _THICK)
    _draw_arcs(top, arcs, largest, thick)
    _draw_rails(lines, rails, rest)
    _draw_times(times, profile)
    _draw_bytes(weights, [layer.param_bytes + layer.frozen_bytes for layer in profile.layers], "parameters")
    _draw_bytes(kept, [layer.activation_bytes for layer in profile.layers], "activations", plan)
    if plan is not None:
        _draw_cuts((top, lines, times, weights, kept), plan, room)
    _name_layers(kept, names, room)
    kept.set_xlabel("layer: name, index; times and activations are of one microbatch", fontsize=8)
    handles = _legend(profile, values, largest, thick, plan)
    figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False, fontsize=8)
    return figure


def _away(value: Value, plan: Plan | None) -> frozenset[int]:
    if plan is None:
        return frozenset()
    return frozenset(t for t in value.targets if plan.rank_of_layer(t) != plan.rank_of_layer(value.source))


def _title(profile: Profile, plan: Plan | None) -> str:
    kept = sum(layer.activation_bytes for layer in profile.layers)
    lines = [
        f"{words.profile_title(profile)}, {profile.device}",
        f"{words.profile_times(profile)}, parameters {words.gigabytes(profile.param_bytes + profile.frozen_bytes)} GB, "
        f"activations {words.gigabytes(kept)} GB",
    ]
    if plan is not None:
        stages, ranks = words.counted(plan.num_stages, "stage"), words.counted(plan.pipeline_ranks, "rank")
        lines.append(f"{stages} on {ranks}; stages of one shade share a rank")
    return "\n".join(lines)


def _draw_arcs(axes: Axes, arcs: Sequence[_Value], largest: int, thick: float) -> None:
    """As wide as the root of the bytes: a value of a hundredth is a tenth as wide."""
    widest = max((arc.targets[0] - arc.source for arc in arcs), default=1)
    for away, colour, dashes in ((False, _STAYS, "-"), (True, _TRAVELS, _DASHES)):
        mine = [arc for arc in arcs if bool(arc.away) is away]
        curves = [_curve(arc.source, arc.targets[0], widest) for arc in mine]
        widths = [_THIN + (thick - _THIN) * math.sqrt(arc.bytes / (largest or 1)) for arc in mine]
        axes.add_collection(LineCollection(curves, colors=colour, linewidths=widths, linestyles=[dashes], alpha=0.8))
    axes.set_ylim(0, 1.06)
    _bare(axes)
    axes.set_ylabel("skips" if arcs else "no skips", rotation=0, ha="right", va="center")


def _curve(source: int, target: int, widest: int) -> list[tuple[float, float]]:
    """Half an ellipse; flat ones keep a height that can be seen."""
    middle, half, steps = (source + target) / 2, (target - source) / 2, 48
    height = 0.08 + 0.92 * ((target - source) / widest)
    angles = [math.pi * (1 - step / steps) for step in range(steps + 1)]
    return [(middle + half * math.cos(angle), height * math.sin(angle)) for angle in angles]


def _draw_rails(axes: Axes, rails: Sequence[_Value], rest: Sequence[_Value]) -> None:
    """A square where the value is made, a dot where it is read, hollow on another rank."""
    for row, rail in enumerate(rails):
        axes.plot([rail.source, rail.targets[-1]], [row, row], color=_STAYS, linewidth=0.8)
        axes.plot(rail.source, row, "s", color=_STAYS, markersize=4)
        here = [target for target in rail.targets if target not in rail.away]
        axes.plot(here, [row] * len(here), "o", color=_STAYS, markersize=3)
        axes.plot(sorted(rail.away), [row] * len(rail.away), linestyle="none", **_AWAY)
    axes.set_ylim(len(rails) - 0.4, -0.6)
    axes.set_visible(bool(rails))
    _bare(axes)
    labels = [f"{words.shortened(rail.name)} ({words.megabytes(rail.bytes)})" for rail in rails]
    axes.set_yticks(range(len(rails)), labels, fontsize=7, parse_math=False)
    axes.tick_params(axis="y", length=0)
    if rest:
        sizes = words.megabytes(max(value.bytes for value in rest))
        axes.set_xlabel(f"and {len(rest)} more values with several readers, of {sizes} at most", fontsize=7)


def _draw_times(axes: Axes, profile: Profile) -> None:
    forward = [layer.forward_ms for layer in profile.layers]
    backward = [layer.backward_ms for layer in profile.layers]
    bars: dict[str, Any] = {"edgecolor": _BACKWARD_EDGE, "linewidth": 0.4, "width": 0.8}
    axes.bar(range(len(forward)), forward, color=_FORWARD, **bars)
    axes.bar(range(len(forward)), backward, bottom=forward, color=_BACKWARD, hatch="////", **bars)
    known = [(i, x.forward_ms + x.backward_ms, x.spread) for i, x in enumerate(profile.layers) if x.spread is not None]
    places, totals = [i for i, _, _ in known], [total for _, total, _ in known]
    axes.errorbar(places, totals, yerr=[t * s / 2 for _, t, s in known], fmt="none", ecolor="black", elinewidth=0.8)
    axes.set(ylabel="ms", ylim=(0, None))


def _draw_bytes(axes: Axes, sizes: Sequence[int], what: str, plan: Plan | None = None) -> None:
    """Hollow where the plan runs a layer again in backward and keeps its input only."""
    unit, letter = (1e9, "GB") if max(sizes) >= 1e9 else (1e6, "MB")
    again = set() if plan is None else set(plan.recompute)
    faces = ["white" if index in again else _BYTES for index in range(len(sizes))]
    heights = [size / unit for size in sizes]
    axes.bar(range(len(sizes)), heights, color=faces, edgecolor=_BYTES, linewidth=0.6, width=0.8)
    axes.set(ylabel=f"{what}\n{letter}", ylim=(0, None))


def _draw_cuts(all_axes: Sequence[Axes], plan: Plan, room: float) -> None:
    """A line at each cut, stages of a rank in one shade, rank and stage above."""
    top, colours = all_axes[0], matplotlib.colormaps["rainbow"]
    for stage in range(plan.num_stages):
        first, end = plan.boundaries[stage] - 0.5, plan.boundaries[stage + 1] - 0.5
        for axes in all_axes:
            colour = colours(plan.placement[stage] / plan.pipeline_ranks)
            axes.axvspan(first, end, color=colour, alpha=_SHADE, linewidth=0, zorder=0)
            if stage:
                axes.axvline(first, color="#000000", linewidth=0.8, linestyle=(0, (1, 1.5)))
        rank, wide = plan.placement[stage], (end - first) * room > _LABEL_POINTS
        label = f"stage {stage}\nrank {rank}" if wide else f"{stage}\nr{rank}"
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        top.annotate(label, ((first + end) / 2, 1.0), fontsize=7, **place)


def _name_layers(axes: Axes, names: Sequence[str], room: float) -> None:
    """All of them where a layer has the room in points, else every second, fifth, ..."""
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100, len(names)) if len(names) / n <= _MOST_NAMES)
    places = range(0, len(names), step)
    size = min(8.0, max(5.0, 0.8 * room * step))
    axes.set_xticks(places, [f"{names[i]}  {i}" for i in places], rotation=90, fontsize=size, parse_math=False)
    axes.set_xlim(-0.8, len(names) - 0.2)


def _bare(axes: Axes) -> None:
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])


def _legend(
    profile: Profile, values: Sequence[_Value], largest: int, thick: float, plan: Plan | None
) -> list[Patch | Line2D]:
    spread = any(layer.spread is not None for layer in profile.layers)
    readers = {min(len(value.targets), 2) for value in values if value.away}
    rails = any(len(value.targets) > 1 for value in values)
    skip, again = f"skip of {words.megabytes(largest)}", plan is not None and plan.recompute
    entries = (
        (True, Patch(facecolor=_FORWARD, edgecolor=_BACKWARD_EDGE, label="forward")),
        (True, Patch(facecolor=_BACKWARD, edgecolor=_BACKWARD_EDGE, hatch="////", label="backward")),
        (spread, Line2D([], [], color="black", linewidth=0.8, label="spread of repeats")),
        (largest, Line2D([], [], color=_STAYS, linewidth=thick, label=skip)),
        (1 in readers, Line2D([], [], color=_TRAVELS, linestyle=_DASHES, label="sent to another rank")),
        (rails, Line2D([], [], color=_STAYS, marker="s", markersize=4, linestyle="none", label="made")),
        (rails, Line2D([], [], color=_STAYS, marker="o", markersize=3, linestyle="none", label="read")),
        (2 in readers, Line2D([], [], label="read on another rank", linestyle="none", **_AWAY)),
        (again, Patch(facecolor="white", edgecolor=_BYTES, label="run again in backward")),
    )
    return [handle for shown, handle in entries if shown]
