"""What a long command is at, on one line of a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from deepspeed_pulse.report.words import milliseconds, percent

_Move = Callable[[str, int, int | None], None]
"""Takes what is going on, how much is done, and how much there is if that is known."""


@contextlib.contextmanager
def solving(stream: TextIO) -> Iterator[Callable[[float, float], None] | None]:
    """Best schedule and bound while the block runs; None where nobody watches.

    Takes the best makespan found so far and the lower bound, in ms.
    """
    with _line(stream, "cutting the layer list") as move:
        yield None if move is None else lambda best_ms, bound_ms: move(describe(best_ms, bound_ms), 0, None)


@contextlib.contextmanager
def visiting(stream: TextIO) -> Iterator[Callable[[str, int, int], None] | None]:
    """The layer at hand and a bar over all of them while the block runs; None where nobody watches.

    Takes the name of a layer, its index and the number of layers.
    """
    with _line(stream, "building the model", bar=True) as move:
        yield None if move is None else lambda name, index, total: move(f"layer {index + 1}: {name}", index, total)


@contextlib.contextmanager
def counting(stream: TextIO) -> Iterator[Callable[[int, int, float], None] | None]:
    """The best choice so far and a bar over all of them while the block runs; None where nobody watches.

    Takes how many choices are decided, how many there are, and the most samples/s so far.
    """
    with _line(stream, "bounding the choices", bar=True) as move:
        yield None if move is None else lambda done, total, best: move(f"best {best:.4g} samples/s", done, total)


@contextlib.contextmanager
def _line(stream: TextIO, first: str, *, bar: bool = False) -> Iterator[_Move | None]:
    """A line that moves while the block runs and is gone afterwards."""
    if not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    what, elapsed = TextColumn("{task.description}"), TimeElapsedColumn()
    columns = (BarColumn(), MofNCompleteColumn(), elapsed, what) if bar else (SpinnerColumn(), what, elapsed)
    with Progress(*columns, console=Console(file=stream), transient=True) as line:
        task = line.add_task(first, total=None)

        def move(text: str, done: int, total: int | None) -> None:
            line.update(task, description=escape(text), completed=done, total=total, refresh=True)

        yield move


def describe(best_ms: float, bound_ms: float) -> str:
    """
    >>> describe(60.0, 57.0)
    'best schedule 60 ms, lower bound 57 ms, gap 5.3 %'
    """
    gap = best_ms / bound_ms - 1.0 if bound_ms > 0 else 0.0
    return f"best schedule {milliseconds(best_ms)}, lower bound {milliseconds(bound_ms)}, gap {percent(gap)}"
