"""Options that make a run a part of the whole: what they name must be there."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence


def require_known(parser: argparse.ArgumentParser, what: str, given: Iterable[str], names: Sequence[str]) -> None:
    """End with a usage error where one of the texts is in none of the names; ``what`` they are, as "--sides"."""
    for text in given:
        if not any(text in name for name in names):
            parser.error(f"{what}: {text!r} is in none of {', '.join(map(repr, names))}")


def require_rows(parser: argparse.ArgumentParser, what: str, given: Iterable[int], count: int) -> None:
    """The same where one of the numbers is not one of a row, counted from 0."""
    for number in given:
        if not 0 <= number < count:
            parser.error(f"{what}: there are 0 to {count - 1}, found {number}")
