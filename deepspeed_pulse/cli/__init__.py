"""``ds_pulse``: profiles, plans, and what a run has written.

Only ``profile``, ``tune --verify`` and ``report`` without a path need torch.

Exit status: 0, 1 for a failed check, 2 for unusable input (one line on stderr, nothing written).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from deepspeed_pulse.cli.parser import make_parser
from deepspeed_pulse.errors import PulseError, shortened

OK, UNUSABLE = 0, 2

LONGEST_LINE = 1000
"""Characters of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        with _ending_is_interrupting():
            arguments = make_parser(str(__doc__)).parse_args(argv)
            return arguments.command(arguments) or OK
    except PulseError as problem:
        return _complain(str(problem))
    except OSError as problem:
        if problem.filename is None:
            raise
        return _complain(f"{problem.filename}: {problem.strerror}")
    except KeyboardInterrupt:
        return _complain("interrupted")


@contextlib.contextmanager
def _ending_is_interrupting() -> Iterator[None]:
    """SIGTERM (``timeout``, a cluster's scheduler) cleans up as Ctrl-C does: no files or processes are left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _complain(message: str) -> int:
    """The message on one line of stderr."""
    print("ds_pulse: error: " + shortened(" ".join(message.split()), LONGEST_LINE), file=sys.stderr)
    return UNUSABLE
