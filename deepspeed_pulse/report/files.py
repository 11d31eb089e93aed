"""Plans and timelines as files; a file is whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import format_schedule
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.report import words

IMAGES = (".png", ".svg", ".pdf")
PICTURES = (*IMAGES, ".html", ".json")
SUFFIXES = (*PICTURES, ".csv")

_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Of writing to a file that is open: such an error names no file."""


def write(path: Path, plan: Plan, timeline: Timeline, *, memory: bool) -> None:
    """What the suffix asks for."""
    if path.suffix == ".csv":
        path.write_text(to_csv(plan), encoding="utf-8")
        return
    title = "planned"
    if path.suffix != ".json" and plan.solver is not None:
        title += f", schedule {words.schedule(plan.solver.name)}"
    write_rows(path, [(title, timeline)], plan, memory=memory)


def to_csv(plan: Plan) -> str:
    """The schedule as the table that torch.distributed.pipelining reads: a row a rank, cells like ``2F0``.

    Compute actions only (torch's ``compute_only``), in order; torch derives the messages itself.
    """
    return "".join(",".join(row) + "\n" for row in format_schedule(plan.schedule))


def write_rows(path: Path, rows: Sequence[tuple[str, Timeline]], plan: Plan, *, memory: bool = False) -> None:
    """Named timelines of a plan as a trace, a page or a picture, as the suffix asks for."""
    placement, backbones = plan.placement, [part.name for part in plan.backbones]
    if path.suffix == ".json":
        from deepspeed_pulse.report.trace import write_trace

        write_trace(path, rows, placement, backbones=backbones)
    elif path.suffix == ".html":
        from deepspeed_pulse.report.html import write_page

        write_page(path, rows, placement, backbones=backbones)
    else:
        from deepspeed_pulse.report.timeline import draw_timelines

        draw_timelines(rows, placement, path, memory=memory, backbones=backbones)


@contextlib.contextmanager
def replacing(name: str) -> Iterator[Path]:
    """A path beside ``name``; what the block writes there takes its place when the block ends well.

    Whether it can be written is known before the block begins, and nothing lies there until the block writes, so that
    a search that is killed leaves no file. What is there and is no regular file (a device, a pipe) is written to.
    """
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
        with _telling(name, Path(name)):  # a shell's pipe has no path but this one
            yield Path(name)
        return
    target = Path(os.path.realpath(name))
    beside = target.with_name(f".{target.stem}.{secrets.token_hex(8)}{target.suffix}")
    try:
        if target.is_dir():
            raise IsADirectoryError("it is a directory")
        beside.touch()
        beside.unlink()
    except OSError as problem:
        raise _unwritable(name, problem) from None
    try:
        with _telling(name, beside):
            yield beside
            beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _telling(name: str, path: Path) -> Iterator[None]:
    """A :class:`FileError` about ``name`` where ``path``, which stands for it, cannot be written."""
    try:
        yield
    except OSError as problem:
        if problem.filename != str(path) and problem.errno not in _OF_WRITING:
            raise  # of something else that the block does
        raise _unwritable(name, problem) from None


def _unwritable(name: str, problem: OSError) -> FileError:
    return FileError(f"cannot write {name}: {problem.strerror or problem}")
