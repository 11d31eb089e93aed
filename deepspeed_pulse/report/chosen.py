"""What "auto" stood for: the choice, the runner-ups, and why it was not one of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from deepspeed_pulse.ir.choice import Option, Trial, Tuning, Verdict
from deepspeed_pulse.ir.plan import Estimate
from deepspeed_pulse.report import words
from deepspeed_pulse.report.table import new_table
from deepspeed_pulse.report.tuning import describe

RUNNER_UPS = 3
_SAME = 5e-4
"""Share of the step below which two are as fast as each other."""


def options(tuning: Tuning) -> tuple[Option, ...]:
    """The best and its runner-ups, where there is room one of each number of pipeline ranks."""
    best, *others = tuning.ranked
    first_of = {trial.choice.pipeline_ranks: trial for trial in reversed(tuning.ranked)}
    leading = [trial for trial in others if trial in first_of.values()]
    rest = [trial for trial in others if trial not in leading]
    shown = sorted((leading + rest)[:RUNNER_UPS], key=others.index)
    return tuple(
        Option(
            choice=trial.choice,
            samples_per_second=trial.figures.samples_per_second,
            step_ms=trial.figures.step_ms,
            bubble_ratio=trial.figures.bubble_ratio,
            peak_bytes=trial.figures.peak_bytes,
            why=_ahead(best, others) if trial is best else _behind(trial, best),
        )
        for trial in (best, *shown)
    )


def _ahead(best: Trial, others: Sequence[Trial]) -> str:
    fastest = min((trial.figures.step_ms for trial in others), default=best.figures.step_ms)
    more = best.figures.step_ms / fastest - 1
    return "the fastest" if more < _SAME else f"{words.percent(more)} behind the fastest, and sends less"


def _behind(trial: Trial, best: Trial) -> str:
    """How much slower, and what adds most to it: work of the ranks, waiting, reducing gradients, or the optimizer."""
    mine, its = trial.figures, best.figures
    more = mine.step_ms / its.step_ms - 1
    if more < -_SAME:
        return f"its step is planned {words.percent(-more)} shorter, but sends more, which takes cores from the work"
    if more < _SAME:
        return "as fast, with more ranks in a pipeline or more memory"
    work, idle, summing, stepping = (a - b for a, b in zip(_times(mine), _times(its), strict=True))
    parts = {
        "ranks work longer": work,
        f"ranks wait longer (bubble {words.percent(mine.bubble_ratio)} instead of "
        f"{words.percent(its.bubble_ratio)})": idle,
        f"reducing gradients adds {words.milliseconds(mine.summed_ms - mine.makespan_ms)}": summing,
        f"the optimizer's step adds {words.milliseconds(mine.optimizer_ms)}": stepping,
    }
    return f"its step takes {words.percent(more)} longer: {max(parts, key=lambda part: parts[part])}"


def _times(figures: Estimate) -> tuple[float, float, float, float]:
    """A step's ms in which ranks work, in which they wait, then sum gradients, and then step the optimizer."""
    whole, bubble = figures.makespan_ms, figures.bubble_ratio
    return whole * (1 - bubble), whole * bubble, figures.summed_ms - whole, figures.optimizer_ms


def rejected(tuning: Tuning) -> tuple[str, ...]:
    """A line for each reason to reject choices."""
    lines = []
    for verdict in (Verdict.MEMORY, Verdict.SLOW, Verdict.LAYERS, Verdict.SIZE, Verdict.UNTRIED):
        same = [trial for trial in tuning.rejected if trial.verdict is verdict]
        if same:
            lines.append(f"{len(same)} {verdict.value}, for example {describe(same[0].choice)}: {same[0].reason}")
    return tuple(lines)


def chosen_table(names: Sequence[str], found: Sequence[Option], reasons: Sequence[str], notes: Sequence[str]) -> Group:
    """What was chosen for the settings ``names``, which were "auto".

    ``found``: of :func:`options`. ``reasons``: of :func:`rejected`. ``notes``: lines to add.
    """
    table = new_table(("", "choice", "samples/s", "GB a rank", "why"), text=("", "choice", "why"))
    for index, option in enumerate(found):
        low, high = min(option.peak_bytes), max(option.peak_bytes)
        sizes = " to ".join(dict.fromkeys((words.gigabytes(low), words.gigabytes(high))))
        speed = f"{option.samples_per_second:.4g}"
        table.add_row("" if index else "chosen", describe(option.choice), speed, sizes, option.why)
    choice = found[0].choice
    ranks = words.counted(choice.num_ranks, "rank")
    title = f"pulse: chosen for {', '.join(names)}: {choice.global_batch} samples a step on {ranks}"
    return Group(Text(title, style="bold"), table, *map(Text, (*[f"rejected: {line}" for line in reasons], *notes)))
