"""What a long command is at: on one line of a terminal, or as a line now and then in a file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TextIO

from deepspeed_pulse.report.words import milliseconds, percent

EVERY_SECONDS = 10.0
"""Between two lines where the stream is no terminal, so that a short command writes none."""


def solving(stream: TextIO) -> AbstractContextManager[Callable[[float, float], None]]:
    """Best schedule and bound while the block runs.

    Takes the best makespan found so far and the lower bound, in ms.
    """
    return _line(stream, "cutting the layer list", lambda best_ms, bound_ms: (describe(best_ms, bound_ms), 0, None))


def visiting(stream: TextIO) -> AbstractContextManager[Callable[[str, int, int], None]]:
    """The layer at hand and a bar over all of them while the block runs.

    Takes the name of a layer, its index and the number of layers.
    """
    return _line(
        stream, "building the model", lambda name, index, total: (f"layer {index + 1}: {name}", index, total), bar=True
    )


def counting(stream: TextIO) -> AbstractContextManager[Callable[[int, int, float], None]]:
    """The best choice so far and a bar over all of them while the block runs.

    Takes how many choices are decided, how many there are, and the most samples/s so far.
    """
    return _line(
        stream, "bounding the choices", lambda done, total, best: (f"best {best:.4g} samples/s", done, total), bar=True
    )


@contextlib.contextmanager
def _line(
    stream: TextIO, first: str, told: Callable[..., tuple[str, int, int | None]], *, bar: bool = False
) -> Iterator[Callable[..., None]]:
    """A line that moves while the block runs and is gone afterwards; in a file, lines that stay.

    ``told`` makes of what is given what is going on, how much is done, and how much there is if that is known.
    """
    if not stream.isatty():
        yield _lines(stream, told)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    what, elapsed = TextColumn("{task.description}"), TimeElapsedColumn()
    columns = (BarColumn(), MofNCompleteColumn(), elapsed, what) if bar else (SpinnerColumn(), what, elapsed)
    with Progress(*columns, console=Console(file=stream), transient=True) as line:
        task = line.add_task(first, total=None)

        def move(*given: Any) -> None:
            text, done, total = told(*given)
            line.update(task, description=escape(text), completed=done, total=total, refresh=True)

        yield move


def _lines(stream: TextIO, told: Callable[..., tuple[str, int, int | None]]) -> Callable[..., None]:
    """Writes where the last line is ten seconds old: how much is done, seconds since the start, what is going on."""
    began = last = time.monotonic()

    def move(*given: Any) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY_SECONDS:
            return
        last = now
        text, done, total = told(*given)
        print(f"{'' if total is None else f'{done} of {total}, '}{now - began:.0f} s: {text}", file=stream, flush=True)

    return move


def describe(best_ms: float, bound_ms: float) -> str:
    """
    >>> describe(60.0, 57.0)
    'best schedule 60 ms, lower bound 57 ms, gap 5.3 %'
    >>> describe(60.0 - 1e-9, 60.0)
    'best schedule 60 ms, lower bound 60 ms, gap 0.0 %'
    """
    gap = max(0.0, best_ms / bound_ms - 1.0) if bound_ms > 0 else 0.0
    return f"best schedule {milliseconds(best_ms)}, lower bound {milliseconds(bound_ms)}, gap {percent(gap)}"
