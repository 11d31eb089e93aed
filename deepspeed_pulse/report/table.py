"""Tables that read at 80 columns: numbers are whole, headings and words break at spaces only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from deepspeed_pulse.report import words

_LEAST_LETTERS, _ANY_WIDTH = 12, 10_000


def new_table(headings: Sequence[str], *, text: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table. Columns named in ``text`` hold words and break; the others hold numbers, which do not."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        if heading in text:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    return table


@dataclass(frozen=True)
class Name:
    """A name without spaces as a cell; where it has no room its end is shown, which tells layers apart."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_LEAST_LETTERS, len(self.text)), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(words.shortened(self.text, options.max_width), no_wrap=True)


@dataclass(frozen=True)
class OneThatFits:
    """The first of two tables of the same content where there is room for its words, else the second."""

    wide: Table
    narrow: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(max_width=_ANY_WIDTH), self.wide).minimum
        yield self.wide if needed <= options.max_width else self.narrow
