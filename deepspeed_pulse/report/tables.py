"""The start-up table of a plan, what was measured beside it, and the layers of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.run import Difference, MeasuredStep, RankMemory
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.report import words
from deepspeed_pulse.report.table import Name, new_table

UNKNOWN = "-"
_UNITS = "params: parameters, in millions; kept: what a forward keeps for backward, of one microbatch"


def plan_table(
    plan: Plan,
    *,
    profile: Profile | None = None,
    layer_names: Sequence[str] | None = None,
    param_counts: Sequence[int] | None = None,
    costs: str | None = None,
    timed: bool = True,
) -> Group:
    """Rank, stages, layers, parameters and predicted GB, with the prediction below.

    ``profile`` gives names, parameter counts and ``costs`` (where the layer costs came from, for example ``measured at
    start``) that are not given. ``timed``: costs are times and bytes, so that more can be predicted than the bubble.
    """
    if profile is not None:
        layer_names = layer_names or [layer.name for layer in profile.layers]
        param_counts = param_counts or words.param_counts(profile)
        costs = costs or f"profile {profile.name} ({profile.device}, {profile.dtype})"
    owners = ("backbone",) * bool(plan.backbones)
    columns = ("rank", "stages", *owners, "layers", "parameters", "predicted GB")
    table = new_table(columns, text=("rank", *owners, "layers"))
    bare = words.without_backbones(plan, layer_names)
    for rank in range(plan.pipeline_ranks):
        parameters = None if param_counts is None else sum(param_counts[i] for i in plan.layers_of(rank))
        figures = (
            UNKNOWN if parameters is None else words.count(parameters),
            UNKNOWN if plan.estimate is None or not timed else words.gigabytes(plan.estimate.peak_bytes[rank]),
        )
        for index, stage in enumerate(plan.stages_of(rank)):
            owner = [Name(plan.backbones[plan.placement.backbone_of(stage)].name)] if plan.backbones else []
            layers = words.stage_layers(plan, stage, bare)
            table.add_row("" if index else str(rank), str(stage), *owner, layers, *(("", "") if index else figures))
    return Group(Text(_title(plan), style="bold"), table, *map(Text, _caption(plan, costs, layer_names, timed)))


def estimate_table(plan: Plan, timeline: Timeline, estimate: Estimate, *, memory_bytes: int | None = None) -> Group:
    """A plan's simulated figures: a row a rank (busy, idle, peak, what it sends), the whole step below.

    ``memory_bytes``: what a rank has; ranks that need more are marked.
    """
    table = new_table(
        ("rank", "stages", "busy", "idle", "sent per microbatch", "peak GB", ""), text=("rank", "stages", "")
    )
    for rank in range(plan.pipeline_ranks):
        busy = sum(end - start for start, end in timeline.intervals(rank))
        sent = sum(t.num_bytes for t in timeline.every_transfer if t.source_rank == rank)
        peak = estimate.peak_bytes[rank]
        over = memory_bytes is not None and peak > memory_bytes
        table.add_row(
            str(rank),
            ", ".join(map(str, plan.stages_of(rank))),
            words.milliseconds(busy),
            words.milliseconds(timeline.makespan_ms - busy),
            words.megabytes(round(sent / plan.microbatches)),
            words.gigabytes(peak),
            "does not fit" if over else "",
        )
    limit = () if memory_bytes is None else (Text(f"a rank of the cluster has {words.gigabytes(memory_bytes)} GB"),)
    return Group(Text(_title(plan), style="bold"), table, *_step(plan, estimate), *limit)


def _step(plan: Plan, estimate: Estimate) -> Iterator[Text]:
    ms, optimal = words.milliseconds, plan.solver is not None and plan.solver.optimal
    proven = optimal and plan.estimate is not None and plan.estimate.makespan_ms == estimate.makespan_ms
    yield Text(
        f"makespan {ms(estimate.makespan_ms)}, {words.percent(estimate.gap)} above the lower bound "
        f"{ms(estimate.lower_bound_ms)} of these cuts{' (proven optimal)' if proven else ''}"
    )
    stepping = f" ({ms(estimate.optimizer_ms)} of it the optimizer's)" if estimate.optimizer_ms else ""
    yield Text(
        f"step {ms(estimate.step_ms)}{stepping}, bubble {words.percent(estimate.bubble_ratio)}, "
        f"{estimate.samples_per_second:.4g} samples/s"
    )
    yield Text(f"{words.megabytes(estimate.p2p_bytes_per_microbatch)} sent per microbatch, forward and backward")


def audit_text(name: str, problems: Sequence[str], rows: Sequence[str]) -> Text:
    """What is wrong with a plan, a line each; then the rows of the ranks at fault with the places marked."""
    if not problems:
        return Text(f"{name}: no violation")
    number = f"{len(problems)} violation{'' if len(problems) == 1 else 's'}"
    text = Text("\n".join([f"{name}: {number}", *(f"  {line}" for line in problems), *rows]))
    text.highlight_regex(r">>\S+<<", "bold red")
    return text


def profile_table(profile: Profile, figures: Mapping[str, Sequence[float]], *, note: str) -> Group:
    """Parameters, ``figures`` and bytes of every layer; their sums; the named values.

    ``figures``: per layer, by heading; a heading that ends with ``%`` is not summed. ``note``: where they come from.
    """
    columns = {
        "params M": [count / 1e6 for count in words.param_counts(profile)],
        **figures,
        "kept MB": [layer.activation_bytes / 1e6 for layer in profile.layers],
    }
    output = [layer.output_bytes / 1e6 for layer in profile.layers]
    table = new_table(("layer", *columns, "output MB"), text=("layer",))
    for index, layer in enumerate(profile.layers):
        table.add_row(Name(layer.name), *(_figure(column[index]) for column in (*columns.values(), output)))
    sums = ("" if heading.endswith("%") else _figure(sum(column)) for heading, column in columns.items())
    table.add_section()
    table.add_row("all", *sums, "", style="bold")
    sizes = {value.name: value.bytes for value in profile.values}
    several = f"{', '.join(sizes)}; {words.megabytes(sum(sizes.values()))} in all" if sizes else "none"
    below = (words.profile_times(profile), f"named values: {several}", _UNITS, note)
    return Group(Text(words.profile_title(profile), style="bold"), table, *map(Text, below))


def layer_times(profile: Profile) -> dict[str, list[float]]:
    """Forward and backward of every layer, the weights' part and the spread if known, for :func:`profile_table`."""
    weights = [layer.weight_grad_ms for layer in profile.layers if layer.weight_grad_ms is not None]
    spread = [100 * layer.spread for layer in profile.layers if layer.spread is not None]
    return {
        "forward ms": [layer.forward_ms for layer in profile.layers],
        "backward ms": [layer.backward_ms for layer in profile.layers],
        **({"weights' ms": weights} if len(weights) == profile.num_layers else {}),
        **({"spread %": spread} if len(spread) == profile.num_layers else {}),
    }


def _figure(value: float) -> str:
    """Three digits, and all of them before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def measured_table(plan: Plan, measured: MeasuredStep, difference: Difference | None = None) -> Group:
    """Measured figures beside the predicted ones: a row for the step and two for each rank.

    ``difference``: gives each difference the part that explains most of it.
    """
    estimate = plan.estimate
    table = new_table(("", "predicted", "measured", "difference", "mostly"), text=("", "mostly"))
    mostly = "" if difference is None else _most_of_step(difference)
    _compare(table, "step", estimate.step_ms if estimate else None, measured.step_ms, words.milliseconds, mostly)
    bubble = words.percent(estimate.bubble_ratio) if estimate else UNKNOWN
    table.add_row("bubble", bubble, words.percent(measured.timeline.bubble_ratio))
    for rank, figures in enumerate(measured.ranks):
        predicted = estimate.peak_bytes[rank] if estimate else None
        mostly = _most_of_memory(difference.memory[rank]) if difference is not None and difference.memory else ""
        _compare(table, f"rank {rank} GB", predicted, figures.peak_live_bytes, words.gigabytes, mostly)
        table.add_row(f"rank {rank} idle", UNKNOWN, words.milliseconds(figures.idle_ms))
    return Group(Text("pulse: measured beside predicted", style="bold"), table)


def _compare(
    table: Table, name: str, predicted: float | None, measured: float, form: Callable[[float], str], mostly: str
) -> None:
    if predicted is None:
        table.add_row(name, UNKNOWN, form(measured))
        return
    difference = f"{100 * (measured / predicted - 1):+.1f} %" if predicted else UNKNOWN
    table.add_row(name, form(predicted), form(measured), difference, mostly)


def _most_of_step(difference: Difference) -> str:
    """The part of the difference that goes furthest in its direction."""
    parts = {
        "layers": difference.layers_ms,
        "frozen parts": difference.frozen_ms,
        "messages": difference.messages_ms,
        "pauses": difference.pauses_ms,
        "outside actions": difference.outside_ms,
    }
    sign = 1 if difference.measured_ms >= difference.planned_ms else -1
    name = max(parts, key=lambda part: sign * parts[part])
    return f"{name} {'+' if sign > 0 else '-'}{words.milliseconds(abs(parts[name]))}" if sign * parts[name] > 0 else ""


def _most_of_memory(memory: RankMemory) -> str:
    name, num_bytes = memory.parts[0]
    return f"{name} {'+' if num_bytes > 0 else '-'}{words.megabytes(abs(num_bytes))}" if num_bytes else ""


def _title(plan: Plan) -> str:
    solver = "" if plan.solver is None else f", schedule {words.schedule(plan.solver.name)}"
    parallel = "" if plan.data_parallel == 1 else f" x {plan.data_parallel} data parallel"
    ranks, stages = words.counted(plan.pipeline_ranks, "rank"), words.counted(plan.num_stages, "stage")
    microbatches = words.counted(plan.microbatches, "microbatch", "microbatches")
    return (
        f"pulse: {ranks}{parallel}, {plan.placement.name} placement, {stages}, {microbatches} of "
        f"{plan.microbatch_size}{solver}"
    )


def _caption(plan: Plan, costs: str | None, layer_names: Sequence[str] | None, timed: bool) -> Iterator[str]:
    if plan.estimate is not None:
        yield from _predicted(plan, plan.estimate, timed)
    filled = None if plan.fill is None else words.filled(plan.fill, plan.microbatches)
    source = None if costs is None else f"costs: {costs}"
    lines = (filled, words.sent_values(plan), words.recomputed(plan, layer_names), words.summed(plan), source)
    yield from (line for line in lines if line is not None)


def _predicted(plan: Plan, estimate: Estimate, timed: bool) -> Iterator[str]:
    bubble, ms = f"predicted: bubble {words.percent(estimate.bubble_ratio)}", words.milliseconds(estimate.step_ms)
    if not timed:
        yield f"{bubble} if layers cost what is said below; step, memory and bytes sent are unknown"
        return
    yield f"{bubble}, step {ms}, {estimate.samples_per_second:.4g} samples/s"
    optimal = " (proven optimal)" if plan.solver is not None and plan.solver.optimal else ""
    yield (
        f"{words.percent(estimate.gap)} above the lower bound of these cuts{optimal}, "
        f"{estimate.p2p_bytes_per_microbatch / 1e6:.4g} MB sent per microbatch"
    )
    searched = words.search_result(plan)
    if searched is not None:
        yield searched
