"""Solved plans kept by content: the same question finds the answer of an earlier run.

A plan's file is named by a hash of everything that its making depends on, so nothing in the folder ever goes stale;
delete it at will. A file that cannot be read is made anew.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile

PLANNER_VERSION = 7
"""Raised when the planner's answers change, so that kept ones are not used any more."""

WORTH_KEEPING_SECONDS = 1.0
"""A plan that was made faster is made again."""


def plan_file(folder: str | Path, profile: Profile, cluster: Cluster, **options: object) -> Path:
    """Where the plan for a profile on a cluster with these options is kept; the options must go into JSON."""
    question = {
        "planner": PLANNER_VERSION,
        "format": Plan.FORMATS[0],
        "profile": profile.fingerprint,
        "cluster": cluster.to_json(),
        "options": options,
    }
    text = json.dumps(question, sort_keys=True, separators=(",", ":"))
    return Path(folder) / f"plan-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def kept(path: Path, make: Callable[[], Plan]) -> Plan:
    """The plan in the file; else a new one, which is kept if making it took time.

    Raises:
        FileError: the folder cannot be written to.
    """
    if path.exists():
        try:
            return Plan.load(path)
        except FileError:
            pass  # cut short or edited: made anew
    began = time.monotonic()
    plan = make()
    if time.monotonic() - began >= WORTH_KEEPING_SECONDS:
        write_whole(path, plan.to_json())
    return plan
