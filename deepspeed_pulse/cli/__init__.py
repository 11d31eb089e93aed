"""``ds_pulse``: profiles, plans, and what a run has written. Only ``profile`` and ``report`` without a path need torch.

Exit status: 0, 1 for a failed check, 2 for unusable input (one line on stderr, nothing written).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from deepspeed_pulse.cli.parser import make_parser
from deepspeed_pulse.errors import PulseError, shortened

OK, UNUSABLE = 0, 2

LONGEST_LINE = 1000
"""Characters of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        arguments = make_parser(str(__doc__)).parse_args(argv)
        return arguments.command(arguments) or OK
    except PulseError as problem:
        return _complain(str(problem))
    except BrokenPipeError:
        # The reader of a pipe (head, less) has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _complain("interrupted")


def _complain(message: str) -> int:
    """The message on one line of stderr."""
    print("ds_pulse: error: " + shortened(" ".join(message.split()), LONGEST_LINE), file=sys.stderr)
    return UNUSABLE
