"""A job: what is trained, on what, by which rules; and how long and where its plan is searched for.

Both go as they are through partitioner, search, simulator, fill and tuner, so that no call can forget a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.conditioning import SelfConditioned
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.layout import Grid, Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.rules import PLAIN, Rules

Progress = Callable[[float, float], None]
"""Told the best makespan so far and the lower bound, in ms, whenever an order was found."""

UNLIMITED_BYTES = 2**62
"""Of a rank whose memory does not count."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a plan's times and memory depend on, its cuts and its order apart.

    Attributes:
        layout: how global ranks are numbered, which decides what crosses nodes.
        memory_bytes: cap on a rank's ``peak_bytes``; None: the cluster's ``memory_bytes``.
        rules: ZeRO stage, and when gradients are summed.
        recompute: layers that run again in backward: "none", "all", a list of indices and names, or "auto": none if
            that fits the memory, else those that free most for their time, where that is faster than other cuts.
        frozen: parts that encode the next step's batch in idle time, for the profile's microbatch size.
        conditioning: of each self-conditioned backbone, what reads its estimates and how often there is one; which
            microbatches of the order get one is planned.
    """

    profile: Profile
    cluster: Cluster
    pipeline_ranks: int
    microbatches: int
    data_parallel: int = 1
    layout: Layout = Layout.PIPE_MAJOR
    memory_bytes: int | None = None
    rules: Rules = PLAIN
    recompute: str | Sequence[int | str] = "none"
    frozen: Sequence[FrozenPart] = ()
    conditioning: Sequence[SelfConditioned] = ()

    @classmethod
    def of(cls, plan: Plan, profile: Profile, cluster: Cluster, **changes: Any) -> Job:
        """The job that a plan is for, its memory the cluster's; ``changes``: other values of attributes."""
        made_for: dict[str, Any] = {
            "pipeline_ranks": plan.pipeline_ranks,
            "microbatches": plan.microbatches,
            "data_parallel": plan.data_parallel,
            "layout": plan.layout,
            "rules": plan.rules,
            "recompute": plan.recompute,
            "frozen": () if plan.fill is None else plan.fill.parts,
            "conditioning": tuple(replace(one, microbatches=()) for one in plan.conditioning),
        }
        return cls(profile=profile, cluster=cluster, **(made_for | changes))

    @property
    def grid(self) -> Grid:
        return Grid(pipeline_ranks=self.pipeline_ranks, data_parallel=self.data_parallel, layout=self.layout)

    @property
    def limit_bytes(self) -> int:
        """What a rank may hold."""
        return self.cluster.memory_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Which cuts and orders of a job are looked at, and for how long.

    Attributes:
        placement: "wave", "linear", "loop", or "auto": wave or linear, the one that is faster in simulation, the wave
            among equals; where microbatches are few also two waves or a loop, if that is 1 % faster.
        waves: of a wave; of a loop, half of its rounds: 2 * ranks * waves stages either way.
        boundaries: explicit cuts, 0 and the layer count included; "auto" placement then follows from their number.
        schedule: "auto" or a generator's name.
        split_backward: the order may run backward as ``I`` and ``W``; None: if that is faster by a profile that knows
            what halves take, or if the schedule needs it.
        solver_seconds: search for better orders, in processor time; 0: known ones only.
        tolerance: share of the largest load that may be given up for fewer bytes between ranks.
        within_ms: give up on cuts as soon as it is clear that no order of them has a step as short as that.
        part_skips: cuts of a wave may also send skips that could stay, for a better balance, where that is faster
            in known orders. None: if ``placement`` is "auto".
        backbone_steps: of several backbones: "together", "each" (each makes its optimizer step as soon as its own last
            backward has ended, and the next steps of the others run meanwhile), or "auto": what is faster.
    """

    placement: str = "auto"
    waves: int = 1
    boundaries: Sequence[int] | None = None
    schedule: str = "auto"
    split_backward: bool | None = None
    solver_seconds: float = 30.0
    seed: int = 0
    tolerance: float = 0.0
    within_ms: float = math.inf
    part_skips: bool | None = None
    backbone_steps: str = "together"

    @property
    def parts_skips(self) -> bool:
        return self.placement == "auto" if self.part_skips is None else self.part_skips


DEFAULTS = SearchOptions()
