"""The loss of every step: a table on disk and a bar in the terminal."""

from __future__ import annotations

import csv
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

STEPS_PER_LINE = 50
"""Where a bar cannot be drawn: the output is a file."""


class Losses:
    """Written by the first rank; a resumed run goes on where its checkpoint stands."""

    def __init__(self, table: Path, *, first_step: int, num_steps: int) -> None:
        self.table = table
        rows = [row for row in _rows(table) if int(row[0]) <= first_step]
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["step", "loss"], *rows])
        self.smooth: float | None = None
        columns = BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        self.bar = Progress(*columns)
        self.task = self.bar.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> Losses:
        self.bar.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.bar.stop()

    def add(self, step: int, loss: float) -> None:
        with self.table.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([step, loss])
        self.smooth = loss if self.smooth is None else 0.95 * self.smooth + 0.05 * loss
        self.bar.update(self.task, completed=step, description=f"loss {self.smooth:.4f}")
        if not self.bar.console.is_terminal and step % STEPS_PER_LINE == 0:
            print(f"step {step}: loss {self.smooth:.4f}", flush=True)


def _rows(table: Path) -> list[list[str]]:
    if not table.is_file():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]
