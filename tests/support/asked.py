"""A job and how its plan is searched for, from one set of names."""

from __future__ import annotations

from typing import Any

from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, SearchOptions


def asked(profile: Profile, **names: Any) -> tuple[Job, SearchOptions]:
    """For ``make_plan(*asked(...))``."""
    searched = {name: names.pop(name) for name in list(names) if name in SearchOptions.__dataclass_fields__}
    return Job(profile=profile, **names), SearchOptions(**searched)
