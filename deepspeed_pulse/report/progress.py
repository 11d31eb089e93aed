"""What the planner has so far, on one line of a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from deepspeed_pulse.report.words import milliseconds, percent

Show = Callable[[float, float], None]
"""Takes the best makespan found so far and the lower bound, in ms."""


@contextlib.contextmanager
def solving(stream: TextIO) -> Iterator[Show | None]:
    """A line that moves while the block runs and is gone afterwards; None where nobody watches."""
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as line:
        task = line.add_task("cutting the layer list", total=None)

        def show(best_ms: float, bound_ms: float) -> None:
            line.update(task, description=describe(best_ms, bound_ms), refresh=True)

        yield show


def describe(best_ms: float, bound_ms: float) -> str:
    """
    >>> describe(60.0, 57.0)
    'best schedule 60 ms, lower bound 57 ms, gap 5.3 %'
    """
    gap = best_ms / bound_ms - 1.0 if bound_ms > 0 else 0.0
    return f"best schedule {milliseconds(best_ms)}, lower bound {milliseconds(bound_ms)}, gap {percent(gap)}"
