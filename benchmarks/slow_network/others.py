"""The sides that are not this project's, each with the cuts and options its users would take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slow_network.plans import balanced
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
    cuts = {placement: balanced(case, profile, placement) for placement in ("linear", "wave", "loop")}

    def job(side: str, placement: str = "", **options: Any) -> Job:
        if placement:
            options["boundaries"] = cuts[placement]
        return Job(side=side, case=case, options=options, speeds=speeds, steps=steps)

    yield "1F1B, stock", job("relayed", "linear", dualpipev=False, joined=False)
    yield "1F1B", job("relayed", "linear", dualpipev=False, joined=True)
    yield "DualPipeV, stock", job("relayed", "wave", dualpipev=True, joined=False)
    yield "DualPipeV", job("relayed", "wave", dualpipev=True, joined=True)
    yield "ZB-V", job("pipelining", "wave", zbv=True)
    yield "interleaved", job("pipelining", "loop", zbv=False)
    yield "ZeRO-2", job("data_parallel", zero=True)
    yield "DDP", job("data_parallel", zero=False)
