"""The named values of a profile."""

from __future__ import annotations

from deepspeed_pulse.ir.graph import NamedValue
from deepspeed_pulse.ir.profile import Profile


def named_values(profile: Profile) -> tuple[NamedValue, ...]:
    """The profile's skips, entries of one name joined, in order of first appearance."""
    targets: dict[str, list[int]] = {}
    sources: dict[str, int] = {}
    for skip in profile.skips:
        sources.setdefault(skip.name, skip.source)
        targets.setdefault(skip.name, []).append(skip.target)
    return tuple(
        NamedValue(name=name, source=sources[name], targets=tuple(sorted(found))) for name, found in targets.items()
    )
