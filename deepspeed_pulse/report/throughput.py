"""What tuning found as a picture: samples/s and memory over the number of pipeline ranks, a line a microbatch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from deepspeed_pulse.ir.choice import Trial, Tuning, Verdict

_STYLE = {"font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none"}
_MARKERS = "os^Dv*P<>X"
_GB = 1e9


def draw_tuning(tuning: Tuning, path: Path) -> None:
    """Write the picture; the suffix says in which format."""
    with matplotlib.rc_context(_STYLE):
        tuning_figure(tuning).savefig(path, dpi=150)


def tuning_figure(tuning: Tuning) -> Figure:
    """Throughput on the left, the fullest rank against the limit on the right.

    A point is the best choice for its P and microbatch size. Hollow points are no plans: on the left what a choice
    that was too slow cannot exceed, on the right what one without room would need.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = sorted({trial.choice.microbatch_size for trial in tuning.trials})
    for index, size in enumerate(sizes):
        look = {"color": f"C{index % 10}", "marker": _MARKERS[index % len(_MARKERS)]}
        best = _best_by_ranks([trial for trial in tuning.trials if trial.choice.microbatch_size == size])
        _line(left, [(p, t.samples_per_second, t.plan is not None) for p, t in best], look, f"b = {size}")
        _line(right, [(p, (t.needed_bytes or 0) / _GB or None, t.plan is not None) for p, t in best], look)
    right.axhline(tuning.memory_bytes / _GB, color="black", linestyle="--", linewidth=1)
    right.annotate("limit", (1, tuning.memory_bytes / _GB), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    ranks = sorted({trial.choice.pipeline_ranks for trial in tuning.trials})
    _decorate(left, ranks, "samples/s")
    _decorate(right, ranks, "GB of the fullest rank")
    left.set_title("hollow: an upper bound, too slow to be simulated", fontsize=8)
    right.set_title("hollow: what would be needed", fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(sizes), frameon=False)
    return figure


def _best_by_ranks(trials: Sequence[Trial]) -> list[tuple[int, Trial]]:
    """Per number of pipeline ranks the fastest plan; without one, the nearest to it."""
    found: dict[int, Trial] = {}
    for trial in trials:
        ranks = trial.choice.pipeline_ranks
        if ranks not in found or _closeness(trial) > _closeness(found[ranks]):
            found[ranks] = trial
    return sorted(found.items())


def _closeness(trial: Trial) -> tuple[bool, bool, float]:
    slow = trial.verdict is Verdict.SLOW
    return trial.plan is not None, slow, trial.samples_per_second or -float(trial.needed_bytes or 0)


def _line(
    axes: Axes, points: Sequence[tuple[int, float | None, bool]], look: dict[str, str], label: str | None = None
) -> None:
    known = [(p, y, solid) for p, y, solid in points if y is not None]
    solid = [(p, y) for p, y, is_plan in known if is_plan]
    hollow = [(p, y) for p, y, is_plan in known if not is_plan]
    axes.plot([p for p, _ in solid], [y for _, y in solid], label=label, linewidth=1.2, **look)
    axes.plot([p for p, _ in hollow], [y for _, y in hollow], linestyle="none", markerfacecolor="none", **look)


def _decorate(axes: Axes, ranks: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ranks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("pipeline ranks P")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
