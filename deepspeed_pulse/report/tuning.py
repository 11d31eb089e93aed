"""What tuning found: the ranked choices, and why the others are not among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepspeed_pulse.ir.choice import Choice, Trial, Tuning, Verdict
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.report import words
from deepspeed_pulse.report.table import OneThatFits, new_table

_ROWS = 10
_CHOICE = ("P", "G", "placement", "b", "M", "ZeRO", "layout")
_FIGURES = ("samples/s", "bubble", "MB sent per sample", "GB a rank")
_RUN = ("measured samples/s", "predicted / measured")


def tuning_table(tuning: Tuning, *, everything: bool = False) -> Group:
    """The best choices, then the rejected by reason; ``everything``: a row for each of both."""
    ranked = tuning.ranked if everything else tuning.ranked[:_ROWS]
    run = any(trial.measured for trial in ranked)
    figures = (*_FIGURES, *(_RUN if run else ()))
    wide = new_table((*_CHOICE, "schedule", "recomputed", *figures), text=("placement", "layout", "schedule"))
    narrow = new_table(("choice", *figures), text=("choice",))
    for trial in ranked:
        cells, plan = (*_figures(trial), *(_measured(trial) if run else ())), trial.planned
        schedule = "" if plan.solver is None else words.schedule(plan.solver.name)
        recomputed = f"{len(plan.recompute)} of {plan.num_layers}" if plan.recompute else ""
        wide.add_row(*_choice(trial.choice), schedule, recomputed, *cells)
        narrow.add_row(f"{describe(trial.choice)}, {schedule}{f', recomputed {recomputed}' * bool(recomputed)}", *cells)
    more = len(tuning.ranked) - len(ranked)
    parts: list[RenderableType] = [Text(_title(tuning), style="bold"), OneThatFits(wide, narrow)]
    if more:
        parts.append(Text(f"and {more} slower ones (--all shows them)"))
    if tuning.rejected:
        parts.append(_all_rejected(tuning.rejected) if everything else _rejected(tuning.rejected))
    return Group(*parts, *map(Text, _advice(tuning)))


def _title(tuning: Tuning) -> str:
    choice = tuning.best.choice
    run = sum(trial.measured is not None for trial in tuning.ranked)
    memory, measured = words.gigabytes(tuning.memory_bytes), f", the best {run} by measurement here" if run else ""
    return (
        f"pulse: {choice.global_batch} samples a step on {words.counted(choice.num_ranks, 'rank')} of {memory} GB: "
        f"{len(tuning.ranked)} choices planned, {len(tuning.rejected)} rejected{measured}"
    )


def _choice(choice: Choice) -> tuple[str, ...]:
    alone = choice.data_parallel == 1
    return (
        str(choice.pipeline_ranks),
        str(choice.data_parallel),
        placement_name(choice),
        str(choice.microbatch_size),
        str(choice.microbatches),
        "" if alone else str(choice.zero_stage),
        "" if alone or choice.pipeline_ranks == 1 else choice.layout.value,
    )


def placement_name(choice: Choice) -> str:
    """``data parallel``, ``data parallel in 2 stages``, ``linear``, ``wave``, ``wave x 2``, ``loop x 2``."""
    if choice.pipeline_ranks == 1:
        return "data parallel" + (f" in {2 * choice.waves} stages" if choice.waves else "")
    if choice.loop:
        return choice.placement.name
    return {0: "linear", 1: "wave"}.get(choice.waves, f"wave x {choice.waves}")


def _figures(trial: Trial) -> tuple[str, ...]:
    figures = trial.figures
    return (
        f"{figures.samples_per_second:.4g}",
        words.percent(figures.bubble_ratio),
        f"{figures.p2p_bytes_per_microbatch / trial.choice.microbatch_size / 1e6:.4g}",
        words.gigabytes(max(figures.peak_bytes)),
    )


def _measured(trial: Trial) -> tuple[str, str]:
    if trial.measured is None:
        return "", ""
    return f"{trial.measured:.4g}", f"{(trial.samples_per_second or 0.0) / trial.measured:.2f}"


def _rejected(trials: Sequence[Trial]) -> Table:
    """A row a verdict, with the choice that came nearest."""
    table = new_table(("rejected", "choices", "nearest", "why"), text=("rejected", "nearest", "why"))
    for verdict in Verdict:
        same = [trial for trial in trials if trial.verdict is verdict]
        if same:
            nearest = min(same, key=_distance)
            table.add_row(verdict.value, str(len(same)), describe(nearest.choice), nearest.reason)
    return table


def _distance(trial: Trial) -> float:
    if trial.verdict is Verdict.MEMORY:
        return float("inf") if trial.needed_bytes is None else trial.needed_bytes
    return -(trial.samples_per_second or 0.0)


def _all_rejected(trials: Sequence[Trial]) -> Table:
    table = new_table((*_CHOICE, "rejected", "why"), text=("placement", "layout", "rejected", "why"))
    for trial in trials:
        table.add_row(*_choice(trial.choice), trial.verdict.value, trial.reason)
    return table


def describe(choice: Choice) -> str:
    """``P=4 G=16 wave, 8 microbatches of 2, ZeRO 1, data-major``."""
    parts = [
        f"P={choice.pipeline_ranks} G={choice.data_parallel} {placement_name(choice)}",
        f"{choice.microbatches} microbatch{'es' * (choice.microbatches > 1)} of {choice.microbatch_size}",
    ]
    if choice.zero_stage:
        parts.append(f"ZeRO {choice.zero_stage}")
    if choice.layout is not Layout.PIPE_MAJOR:
        parts.append(choice.layout.value)
    return ", ".join(parts)


def _advice(tuning: Tuning) -> Iterator[str]:
    choice, plan = tuning.best.choice, tuning.best.planned
    profile = tuning.profiles[choice.microbatch_size]
    if plan.fill is None:
        yield "encoders: what they give is in the data (cached), so there is nothing to fill idle time with (--frozen)"
    else:
        yield words.filled(plan.fill, plan.microbatches)
    yield f"best: {describe(choice)}; PipelineModule(num_stages={choice.pipeline_ranks})"
    yield f"costs: profile {profile.name} ({profile.device}, {profile.dtype})"
