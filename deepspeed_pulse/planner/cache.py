"""Answers of the planner kept by content: the same question finds the answer of an earlier run.

A file is named by a hash of everything that its making depends on, so nothing in the folder ever goes stale;
delete it at will. A file that cannot be read is made anew.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.codec import File
from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.ir.profile import Profile

PLANNER_VERSION = 30
"""Raised when the planner's answers change, so that kept ones are not used any more."""

WORTH_KEEPING_SECONDS = 1.0
"""What was made faster is made again."""

Answer = TypeVar("Answer", bound=File)


def file_of(
    folder: str | Path, answer: type[File], profiles: Sequence[Profile], cluster: Cluster, **options: object
) -> Path:
    """Where what is answered for profiles on a cluster with these options is kept; the options must go into JSON."""
    question = {
        "planner": PLANNER_VERSION,
        "format": answer.FORMATS[0],
        "profiles": [profile.fingerprint for profile in profiles],
        "cluster": cluster.to_json(),
        "options": options,
    }
    text = json.dumps(question, sort_keys=True, separators=(",", ":"))
    return Path(folder) / f"{answer.WHAT}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def kept(path: Path, answer: type[Answer], make: Callable[[], Answer]) -> Answer:
    """What is in the file; else something new, which is kept if making it took time.

    Raises:
        FileError: the folder cannot be written to.
    """
    if path.exists():
        try:
            return answer.load(path)
        except FileError:
            pass  # cut short or edited: made anew
    began = time.monotonic()
    found = make()
    if time.monotonic() - began >= WORTH_KEEPING_SECONDS:
        write_whole(path, found.to_json())
    return found
