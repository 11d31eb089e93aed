"""What runs have written, as tables: plan, measured beside planned, memory, bytes, events; for ``ds_pulse report``."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.run import RUN_FILE, MeasuredStep, Run
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.report import words
from deepspeed_pulse.report.advice import warning
from deepspeed_pulse.report.table import Name, new_table
from deepspeed_pulse.report.tables import measured_table, plan_table

_PATTERNS = (RUN_FILE, "*.run.json", "Train_*.csv")
_STEPS = ("step", "time", "bubble", "peak GB", "hidden", "hidden grad", "values", "values grad", "kept local")
_EVENTS = ("name", "rows", "samples", "first", "last", "smallest", "largest")


@dataclass(frozen=True, kw_only=True)
class Events:
    """One figure over a run, as csv_monitor wrote it: (samples so far, value)."""

    name: str
    rows: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Run files by path, and events by folder."""

    runs: dict[Path, Run]
    events: dict[Path, list[Events]]

    def only_run(self) -> Run:
        """The run to draw."""
        if len(self.runs) != 1:
            names = ", ".join(map(str, self.runs)) or "none"
            raise FileError(f"--out: expected one run file to draw, found {names}; give the file itself")
        ((path, run),) = self.runs.items()
        if not timelines(run):
            raise FileError(
                f"--out: expected a step to draw, found none measured and none predicted in {path}: let the run save "
                "after its third step, or give its PipelineModule an example_batch"
            )
        return run


def collect(paths: Sequence[str]) -> RunFiles:
    """Read files, and the run files and csv_monitor's tables anywhere below folders.

    Raises FileError when a path is not there, holds nothing of the kind, or a file is malformed.
    """
    runs: dict[Path, Run] = {}
    events: dict[Path, list[Events]] = {}
    for name in paths:
        for path in _files(Path(name)):
            if path.suffix == ".csv":
                events.setdefault(path.parent, []).append(_read_events(path))
            else:
                runs[path] = Run.load(path)
    return RunFiles(runs=runs, events=events)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for pattern in _PATTERNS for file in path.rglob(pattern))
    if not found:
        raise FileError(
            f'{path}: expected a run file ({RUN_FILE} beside checkpoints, or .run.json beside a trace: set "trace" in '
            f'the "pulse" block) or tables of csv_monitor (Train_*.csv), found none below this folder'
        )
    return found


def _read_events(path: Path) -> Events:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        # a run that was resumed writes its header again
        values = tuple((float(row[0]), float(row[1])) for row in rows if row[:1] != ["step"])
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, IndexError) as problem:
        raise FileError(f"{path}: expected a table of csv_monitor with two numbers a row: {problem}") from None
    return Events(name=path.stem.removeprefix("Train_"), rows=values)


def report(found: RunFiles) -> Group:
    """Everything that was found, run by run."""
    parts: list[RenderableType] = []
    for path, run in found.runs.items():
        parts += [Text(str(path), style="bold"), *_run(run)]
    for folder, events in found.events.items():
        parts += [Text(str(folder), style="bold"), _events_table(events)]
    return Group(*parts)


def timelines(run: Run) -> list[tuple[str, Timeline]]:
    """The planned step above the measured ones, to draw."""
    rows = [] if run.planned is None else [("planned", run.planned)]
    return rows + [(f"step {step.step}", step.timeline) for step in run.steps]


def _run(run: Run) -> Iterator[RenderableType]:
    yield plan_table(run.plan, layer_names=run.layers, costs=run.costs, timed=run.planned is not None)
    if not run.steps:
        yield Text("no step was measured yet")
        return
    # predictions that come from no times are not worth comparing with
    plan = run.plan if run.planned is not None else replace(run.plan, estimate=None)
    yield measured_table(plan, run.steps[-1], run.difference)
    yield from (Text(line) for line in warning(run.difference))
    yield _steps_table(run.steps)


def _steps_table(steps: Sequence[MeasuredStep]) -> Table:
    table = new_table(_STEPS, title="measured steps")
    for step in steps:
        table.add_row(
            str(step.step),
            words.milliseconds(step.step_ms),
            words.percent(step.timeline.bubble_ratio),
            words.gigabytes(max(rank.peak_live_bytes for rank in step.ranks)),
            *(words.megabytes(sent) for sent in step.p2p_bytes.values()),
            words.megabytes(sum(rank.local_value_bytes for rank in step.ranks)),
        )
    return table


def _events_table(events: Sequence[Events]) -> Table:
    table = new_table(_EVENTS, text=("name",), title="events")
    for event in events:
        values = [value for _, value in event.rows]
        if values:
            figures = [f"{value:.6g}" for value in (values[0], values[-1], min(values), max(values))]
            table.add_row(Name(event.name), str(len(values)), f"{event.rows[-1][0]:.0f}", *figures)
    return table


def environment_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and what was found, without lines, to be pasted into a bug report."""
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
