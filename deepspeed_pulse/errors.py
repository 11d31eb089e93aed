"""Errors a user can meet.

    PulseError
    ├── ConfigError       an argument or a key of the "pulse" block
    ├── GraphError        the layer list: names stashed and popped
    ├── FileError         a profile, cluster or plan file, or a model folder, that cannot be read or written
    ├── PlanError         a plan that does not fit the model, or cannot run
    ├── InfeasibleError   no plan exists under the given limits
    ├── BatchError        data that does not fit the model, or differs between ranks
    └── RunError          something failed while a step ran; names rank, stage, microbatch, action
        └── PeerError     another rank sent or took nothing for too long, or died

Every message says what was expected, what was found, where, and which knob to turn. Where there is more to say than
fits, it ends with the short name of a section of docs/errors.md: ``[docs: too-few-layers]``. An exception of the
user's own, from a layer, a loss function or a loader in a step, keeps its class; layer, step, rank, stage, microbatch
and action stand in its notes (:func:`add_note`).
``assert`` is kept for invariants that no user can break.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 4000
"""Characters of a message. What is quoted in it may be a whole file; the knob to turn stands at the end."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """``text`` without its middle when it is longer than that, saying how much was left out."""
    if len(text) <= longest:
        return text
    left_out = f" ... ({len(text) - longest:,} characters left out) ... "
    kept = longest - len(left_out)
    return text[: kept - kept // 4] + left_out + text[len(text) - kept // 4 :]


class PulseError(Exception):
    """Base of all errors that deepspeed_pulse raises for a user's mistake or a failed run.

    ``more``: short name of the section of docs/errors.md that says more; the message ends with it, on a line of its own
    when it has several. ``text`` is the message without it, for one made of several.
    """

    def __init__(self, message: object = "", *, more: str | None = None) -> None:
        self.text, self.more = shortened(str(message)), more
        before = "\n" if "\n" in self.text else " "
        super().__init__(self.text + (f"{before}[docs: {more}]" if more else ""))


class ConfigError(PulseError):
    """An argument or a key of the ``"pulse"`` block is unusable."""


class GraphError(PulseError):
    """The layer list declares named values that do not fit together."""


class FileError(PulseError):
    """A profile, cluster or plan file, or a model folder, is malformed or missing; names file and field."""


class PlanError(PulseError):
    """A plan does not fit the model, the profile or itself."""


class InfeasibleError(PulseError):
    """No plan exists under the given limits; says what would be needed.

    ``needed_bytes``: what the fullest rank of the most frugal plan found needs, where memory is the limit.
    """

    def __init__(self, message: str, *, needed_bytes: int | None = None, more: str | None = None) -> None:
        super().__init__(message, more=more)
        self.needed_bytes = needed_bytes


class BatchError(PulseError):
    """A batch does not fit the model, or differs between ranks."""


class RunError(PulseError):
    """A step failed; names rank, stage, microbatch and action."""


class PeerError(RunError):
    """Another rank sent or took nothing for too long, or died; says where the ranks are.

    ``is_told``: its message has that already.
    """

    is_told = False


def add_note(problem: Exception, note: str) -> None:
    """Add a line to a user's own exception, which keeps its class; tracebacks show it from Python 3.11 on."""
    if hasattr(problem, "add_note"):
        problem.add_note(note)
    else:
        problem.__notes__ = [*getattr(problem, "__notes__", ()), note]


def in_words(problem: BaseException) -> str:
    """Class, message and notes of an exception that is no :class:`PulseError`, in one text."""
    notes = "".join(f" ({note})" for note in getattr(problem, "__notes__", ()))
    return f"{type(problem).__name__}: {problem}{notes}"


def first_of(names: Iterable[object], shown: int) -> str:
    """A list in a message, cut short.

    >>> first_of("abcde", 3)
    'a, b, c and 2 more'
    """
    found = list(map(str, names))
    return ", ".join(found[:shown]) + (f" and {len(found) - shown} more" if len(found) > shown else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean "x"?)`` when ``word`` is close to one of ``known``, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""
