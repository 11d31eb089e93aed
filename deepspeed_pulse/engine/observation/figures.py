"""What rank 0 prints and writes: the plan at start, measured beside predicted, the trace and the run file."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from rich.console import Console

from deepspeed_pulse.engine.measure.hardware import boot
from deepspeed_pulse.engine.observation.environment import local_ranks
from deepspeed_pulse.engine.plans.choosing import Chosen
from deepspeed_pulse.engine.plans.costs import parameter_counts
from deepspeed_pulse.engine.plans.planning import Planned
from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.run import Difference, MeasuredStep, Run
from deepspeed_pulse.ir.timeline import AnySpan, Timeline
from deepspeed_pulse.report.advice import warning
from deepspeed_pulse.report.chosen import chosen_table
from deepspeed_pulse.report.files import replacing
from deepspeed_pulse.report.runs import timelines
from deepspeed_pulse.report.tables import measured_table, plan_table
from deepspeed_pulse.report.trace import write_trace

Clock = tuple[str, float]


def clock() -> Clock:
    """This rank's machine, and what its clock lacks to the time of day, ms."""
    return socket.gethostname() + boot(), (time.time() - time.perf_counter()) * 1e3


def print_plan(planned: Planned, graph: Graph, layers: Sequence[Any]) -> None:
    """The start-up table."""
    names, counts = [layer.name for layer in graph.layers], parameter_counts(layers)
    timed = planned.profile is None or planned.measured
    Console(markup=False).print(
        plan_table(planned.plan, layer_names=names, param_counts=counts, costs=planned.sources, timed=timed)
    )


def print_recomputing(planned: Planned, interval: int) -> None:
    """What another interval of activation checkpointing means for memory, where that is known."""
    found, cluster = planned.plan.estimate, planned.cluster
    line = f"activation_checkpoint_interval is {interval} from the next step on"
    if found is not None and cluster is not None:
        line += f"; predicted peak {max(found.peak_bytes) / 1e9:.3g} GB a rank"
        if max(found.peak_bytes) > cluster.memory_bytes:
            line += f", more than the {cluster.memory_bytes / 1e9:.3g} GB there are"
    print(f"pulse: {line}", flush=True)


def print_chosen(chosen: Chosen) -> None:
    """What "auto" stands for in this run, once."""
    if chosen.options:
        notes = [] if chosen.asked.derived is None else [f"global batch: {chosen.asked.derived}"]
        Console(markup=False).print(chosen_table(chosen.asked.names, chosen.options, chosen.reasons, notes))


def print_measured(plan: Plan, measured: MeasuredStep, difference: Difference | None) -> None:
    """Measured figures beside the predicted ones, and a warning where they differ much."""
    console = Console(markup=False)
    console.print(measured_table(plan, measured, difference))
    for line in warning(difference, crowded=_crowded()):
        console.print(f"pulse: {line}", highlight=False, soft_wrap=True)


def _crowded() -> str | None:
    """How the ranks of this machine share its cores, where they are CPU ranks with more threads than those."""
    ranks = local_ranks()
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if get_accelerator().device_name() != "cpu" or ranks * threads <= cores:
        return None
    return f"{ranks} ranks of {threads} thread{'s' if threads > 1 else ''} share {cores} cores here"


def write_trace_files(trace: Path, run: Run) -> None:
    """The trace, planned above measured, and the run file beside it."""
    names = [part.name for part in run.plan.backbones]
    _write(trace, lambda file: write_trace(file, timelines(run), run.plan.placement, backbones=names))
    write_run(trace.with_suffix(".run.json"), run)


def write_run(path: Path, run: Run) -> None:
    """The run file."""
    _write(path, lambda file: file.write_text(run.to_json(), encoding="utf-8"))


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """A file is whole or not there; one that cannot be written is a warning, for other ranks go on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(str(path)) as file:
            write(file)
    except (FileError, OSError) as problem:
        print(f"pulse: warning: {path} is not written: {problem}", flush=True)


def joined_timeline(rows: Sequence[tuple[Sequence[AnySpan], Clock]]) -> Timeline:
    """Spans of all ranks as one timeline that starts at zero.

    Ranks of one machine share a clock; of several they share the time of day, as well as the machines keep it.
    """
    machines = {machine for _, (machine, _) in rows}
    spans = [
        _moved(span, offset if len(machines) > 1 else 0.0) for rank_spans, (_, offset) in rows for span in rank_spans
    ]
    start = min((span.start_ms for span in spans), default=0.0)
    return Timeline.of(len(rows), [_moved(span, -start) for span in spans])


def _moved(span: AnySpan, by_ms: float) -> AnySpan:
    return replace(span, start_ms=span.start_ms + by_ms, end_ms=span.end_ms + by_ms)
