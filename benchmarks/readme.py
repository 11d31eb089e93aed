"""Figures in READMEs: a benchmark writes what it measured between marks, and keeps whole runs only."""

from __future__ import annotations

import argparse
from pathlib import Path


def keep_option(parser: argparse.ArgumentParser, *narrowing: str) -> argparse.Namespace:
    """Parse with an option ``--write``, which is refused beside an option that makes the run a part of the whole.

    Args:
        narrowing: names of these options, without dashes.
    """
    parser.add_argument("--write", action="store_true", help="put the tables of a whole run into README.md")
    options = parser.parse_args()
    attributes = {name: name.replace("-", "_") for name in narrowing}
    given = [f"--{name}" for name, at in attributes.items() if getattr(options, at) != parser.get_default(at)]
    if options.write and given:
        parser.error(f"--write keeps whole runs only: leave out {', '.join(given)}")
    return options


def write(path: Path, text: str, begin: str, end: str = "") -> None:
    """Replace what stands between two marks of a file; without ``end``, all that follows ``begin``."""
    path.write_text(replaced(path.read_text(encoding="utf-8"), text, begin, end), encoding="utf-8")


def replaced(old: str, text: str, begin: str, end: str = "") -> str:
    """The same of a text; both marks stay."""
    before, found, rest = old.partition(begin)
    _, last, after = rest.partition(end) if end else ("", "", "")
    if not found or last != end:
        raise SystemExit(f"README.md: expected the line {begin!r}" + (f" and, after it, {end!r}" if end else ""))
    return f"{before}{begin}\n\n{text.strip()}\n" + (f"\n{end}{after}" if end else "")
