"""The sides that are not this project's, each with the cuts and options its users would take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slow_network.plans import PLACEMENTS, balanced
from slow_network.rank import Job

from deepspeed_pulse.ir.profile import Profile


def other_sides(
    case: Any, profile: Profile, speeds: Mapping[str, float | None], *, steps: int = 1
) -> Iterator[tuple[str, Job]]:
    """By name, what the ranks of a side run.

    Args:
        case: a :class:`slow_network.cases.Case`, or what has the same methods.
        speeds, steps: as in :class:`Job`.
    """
    cuts = {schedule: balanced(case, profile, schedule) for schedule in PLACEMENTS}

    def job(side: str, schedule: str = "", **options: Any) -> Job:
        if schedule:
            options["boundaries"] = cuts[schedule]
        return Job(side=side, case=case, options=options, speeds=speeds, steps=steps)

    yield "1F1B, stock", job("relayed", "1f1b", dualpipev=False, joined=False)
    yield "1F1B", job("relayed", "1f1b", dualpipev=False, joined=True)
    yield "DualPipeV, stock", job("relayed", "dualpipev", dualpipev=True, joined=False)
    yield "DualPipeV", job("relayed", "dualpipev", dualpipev=True, joined=True)
    yield "ZB-V", job("pipelining", "zbv", zbv=True)
    yield "interleaved", job("pipelining", "interleaved", zbv=False)
    yield "ZeRO-2", job("data_parallel", zero=True)
    yield "DDP", job("data_parallel", zero=False)
