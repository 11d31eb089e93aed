"""What commands share: what goes to the terminal, and which files they may write."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepspeed_pulse.errors import ConfigError, FileError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log lines of the frameworks, some of which go to stdout, are left out."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def check_suffixes(paths: Sequence[str], suffixes: Sequence[str], option: str = "--out") -> None:
    for path in paths:
        if Path(path).suffix not in suffixes:
            raise ConfigError(f"{option} {path}: expected a name ending in one of {', '.join(suffixes)}")


def check_files(outputs: Sequence[str | None], inputs: Sequence[str | None]) -> None:
    """Each output is a file of its own, and none of those that are read; before anything is done."""
    seen: dict[str, str] = {}
    read = {os.path.realpath(name): name for name in inputs if name is not None}
    for name in filter(None, outputs):
        if os.path.exists(name) and not os.path.isfile(name):  # by its name: a pipe has no path that is real
            continue  # a device or a pipe
        path = os.path.realpath(name)
        if path in read:
            raise ConfigError(f"{name} is read and would be written: give the output another name")
        if path in seen:
            raise ConfigError(f"{seen[path]} and {name} are one file: give each output a name of its own")
        seen[path] = name


def width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def print_text(content: object) -> None:
    """Coloured where stdout is a terminal. What reads a pipe (head, less) may have seen enough: that is no error."""
    from rich.console import Console

    if sys.stdout is None:  # closed
        return
    console = Console(width=width(), highlight=False, markup=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with console.capture() as capture:
            console.print(content)
        sys.stdout.write(capture.get())
        sys.stdout.flush()
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the rest goes when the process ends
        if not isinstance(problem, BrokenPipeError):
            raise FileError(f"cannot write to stdout: {problem.strerror}") from None
