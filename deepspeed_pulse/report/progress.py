"""What a long command is at, on one line of a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from deepspeed_pulse.report.words import milliseconds, percent

Show = Callable[[float, float], None]
"""Takes the best makespan found so far and the lower bound, in ms."""

Count = Callable[[int, int, float], None]
"""Takes how many choices are decided, how many there are, and the most samples/s so far."""

Visit = Callable[[str, int, int], None]
"""Takes the name of a layer, its index and the number of layers."""


@contextlib.contextmanager
def solving(stream: TextIO) -> Iterator[Show | None]:
    """Best schedule and bound while the block runs; None where nobody watches."""
    with _line(stream, "cutting the layer list") as say:
        yield None if say is None else lambda best_ms, bound_ms: say(describe(best_ms, bound_ms))


@contextlib.contextmanager
def visiting(stream: TextIO) -> Iterator[Visit | None]:
    """The layer at hand while the block runs; None where nobody watches."""
    with _line(stream, "building the model") as say:
        yield None if say is None else lambda name, index, total: say(f"layer {index + 1} of {total}: {name}")


@contextlib.contextmanager
def counting(stream: TextIO) -> Iterator[Count | None]:
    """A bar over the choices while the block runs; None where nobody watches."""
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("choices", total=None)

        def show(done: int, total: int, best: float) -> None:
            bar.update(task, completed=done, total=total, description=f"best {best:.4g} samples/s", refresh=True)

        yield show


@contextlib.contextmanager
def _line(stream: TextIO, first: str) -> Iterator[Callable[[str], None] | None]:
    """A line that moves while the block runs and is gone afterwards."""
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as line:
        task = line.add_task(first, total=None)
        yield lambda text: line.update(task, description=escape(text), refresh=True)


def describe(best_ms: float, bound_ms: float) -> str:
    """
    >>> describe(60.0, 57.0)
    'best schedule 60 ms, lower bound 57 ms, gap 5.3 %'
    """
    gap = best_ms / bound_ms - 1.0 if bound_ms > 0 else 0.0
    return f"best schedule {milliseconds(best_ms)}, lower bound {milliseconds(bound_ms)}, gap {percent(gap)}"
