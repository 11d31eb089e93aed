"""The script of an example or a benchmark on ranks that are forked from one process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import diffusers  # noqa: F401  once, before the ranks are forked


def example(arguments: list[str]) -> None:
    """The script, as the launcher runs it."""
    script = Path(arguments[0]).resolve()
    sys.argv = [str(script), *arguments[1:]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
