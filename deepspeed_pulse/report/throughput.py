"""What tuning found as a picture: samples/s and memory over the number of pipeline ranks, a line a microbatch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from deepspeed_pulse.ir.choice import Trial, Tuning, Verdict
from deepspeed_pulse.report.spans import STYLE
from deepspeed_pulse.report.tuning import describe

_MARKERS = "os^Dv*P<>X"
_GB = 1e9
_ASIDE = 0.05
"""Powers of two between microbatch sizes of one P."""

_MOST_LIMITS = 2.0
"""Memory beyond so many times the limit is drawn at the upper edge, with its number."""


def draw_tuning(tuning: Tuning, path: Path) -> None:
    """Write the picture; the suffix says in which format."""
    with matplotlib.rc_context(STYLE):
        tuning_figure(tuning).savefig(path, dpi=150)


def tuning_figure(tuning: Tuning) -> Figure:
    """Throughput, then memory over P against the limit, then each rank of the best choice.

    A point is the best choice for its P and microbatch size. Hollow points are no plans: of throughput what a choice
    that was too slow cannot exceed, of memory what one without room would need. From a point of memory a line goes down
    to the emptiest rank. Microbatch sizes stand side by side where they share a P.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(5, 5, 3))
    limit = tuning.memory_bytes / _GB
    sizes = sorted({trial.choice.microbatch_size for trial in tuning.trials})
    for index, size in enumerate(sizes):
        best = _best_by_ranks([trial for trial in tuning.trials if trial.choice.microbatch_size == size])
        look, aside = _look(index, len(sizes)), 2 ** (_ASIDE * (index - (len(sizes) - 1) / 2))
        _draw_rates(left, best, look, aside)
        _draw_peaks(middle, best, look, aside, limit)
        if size == tuning.best.choice.microbatch_size:
            place = (aside * tuning.best.choice.pipeline_ranks, tuning.best.samples_per_second or 0.0)
            left.plot(*place, "o", markersize=13, markerfacecolor="none", markeredgecolor="black")
    _draw_ranks(right, tuning.best)
    _draw_limit(middle, limit)
    _draw_limit(right, limit)
    ranks = sorted({trial.choice.pipeline_ranks for trial in tuning.trials})
    middle.sharex(left)
    _decorate(left, ranks, "samples/s", "throughput")
    _decorate(middle, ranks, "GB", "memory: fullest rank, down to the emptiest")
    figure.legend(handles=_legend(tuning, sizes), loc="outside lower center", ncols=10, frameon=False)
    return figure


def _look(index: int, count: int) -> dict[str, Any]:
    """Dark for small microbatches, light for large ones, each with a marker of its own."""
    shade = matplotlib.colormaps["viridis"](0.85 * index / max(count - 1, 1))
    return {"color": shade, "marker": _MARKERS[index % len(_MARKERS)]}


def _best_by_ranks(trials: Sequence[Trial]) -> list[Trial]:
    """Per number of pipeline ranks the fastest plan; without one, the nearest to it."""
    every = sorted({trial.choice.pipeline_ranks for trial in trials})
    return [max((t for t in trials if t.choice.pipeline_ranks == ranks), key=_closeness) for ranks in every]


def _closeness(trial: Trial) -> tuple[bool, bool, float]:
    slow = trial.verdict is Verdict.SLOW
    return trial.plan is not None, slow, trial.samples_per_second or -float(trial.needed_bytes or 0)


def _draw_rates(axes: Axes, trials: Sequence[Trial], look: dict[str, Any], aside: float) -> None:
    _draw_points(axes, [(t, t.samples_per_second) for t in trials if t.samples_per_second is not None], look, aside)
    run = [(aside * t.choice.pipeline_ranks, t.measured) for t in trials if t.measured is not None]
    axes.plot([p for p, _ in run], [y for _, y in run], "kx", markersize=7)


def _draw_peaks(axes: Axes, trials: Sequence[Trial], look: dict[str, Any], aside: float, limit: float) -> None:
    highest = _MOST_LIMITS * limit
    known = [(t, t.needed_bytes / _GB) for t in trials if t.needed_bytes]
    _draw_points(axes, [(t, min(gb, highest)) for t, gb in known], look, aside)
    for trial, gb in known:
        ranks = aside * trial.choice.pipeline_ranks
        if gb > highest:
            axes.annotate(f"{gb:.0f}", (ranks, highest), xytext=(0, 4), textcoords="offset points", ha="center")
        if trial.plan is not None and trial.plan.estimate is not None:
            axes.vlines(ranks, min(trial.plan.estimate.peak_bytes) / _GB, gb, color=look["color"], linewidth=1)


def _draw_points(axes: Axes, points: Sequence[tuple[Trial, float]], look: dict[str, Any], aside: float) -> None:
    """Plans joined by a line, others hollow."""
    for is_plan in (True, False):
        mine = [(aside * trial.choice.pipeline_ranks, y) for trial, y in points if (trial.plan is not None) is is_plan]
        style = {"linewidth": 1.2} if is_plan else {"linestyle": "none", "markerfacecolor": "none"}
        axes.plot([p for p, _ in mine], [y for _, y in mine], **look, **style)


def _draw_ranks(axes: Axes, best: Trial) -> None:
    peaks = [num_bytes / _GB for num_bytes in best.figures.peak_bytes]
    axes.bar(range(len(peaks)), peaks, color="#8d8d8d", width=0.7)
    axes.set_xlim(-0.8, max(len(peaks) - 0.2, 1.8))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set(xlabel="pipeline rank", ylabel="GB")
    axes.set_title("best: " + describe(best.choice).replace(", ", ",\n", 1), fontsize=9)


def _draw_limit(axes: Axes, limit: float) -> None:
    axes.axhline(limit, color="black", linestyle="--", linewidth=1)
    axes.annotate("limit", (1, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_ylim(0, 1.1 * max(limit, axes.dataLim.y1))


def _decorate(axes: Axes, ranks: Sequence[int], label: str, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ranks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="pipeline ranks P", ylabel=label, ylim=(0, None))
    axes.set_title(title, fontsize=9)


def _legend(tuning: Tuning, sizes: Sequence[int]) -> list[Line2D]:
    looks = [(f"microbatches of {size}", _look(index, len(sizes))) for index, size in enumerate(sizes)]
    bare: dict[str, Any] = {"linestyle": "none", "color": "black", "markerfacecolor": "none"}
    beyond = any((trial.needed_bytes or 0) > _MOST_LIMITS * tuning.memory_bytes for trial in tuning.trials)
    measured = any(trial.measured is not None for trial in tuning.trials)
    entries = (
        (True, Line2D([], [], marker="o", markersize=11, label="best", **bare)),
        (tuning.rejected, Line2D([], [], marker="s", label="no plan: at most, or needed", **bare)),
        (beyond, Line2D([], [], linestyle="none", label="number: GB beyond the axis")),
        (measured, Line2D([], [], marker="x", label="measured", **bare)),
    )
    sized = [Line2D([], [], label=label, **look) for label, look in looks]
    return sized + [handle for shown, handle in entries if shown]
