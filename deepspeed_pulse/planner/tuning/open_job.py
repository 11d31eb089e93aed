"""A job whose numbers of ranks, pipelines and microbatches are still to be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.choice import Choice, Constraints, may_step_apart
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.frozen import FrozenParts
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.job import Job
from deepspeed_pulse.planner.make import check_cluster, check_counts
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS, not_available
from deepspeed_pulse.planner.tuning.sizes import Sizes

MOST_SAMPLES = 10**6
"""Of a step: every number of samples a rank up to its share is tried."""


@dataclass(frozen=True, kw_only=True)
class OpenJob:
    """``global_batch`` samples a step of a model, on ``world_size`` ranks of a cluster.

    Attributes:
        profiles: one model at one or more microbatch sizes (:class:`~deepspeed_pulse.planner.tuning.sizes.Sizes`).
        world_size: None: all ranks of the cluster.
        memory_bytes: cap on a rank's ``peak_bytes``; None: the cluster's.
        given: what is settled already.
        frozen: encoders that run in idle time; None: what they give is in the data.
    """

    profiles: Sequence[Profile]
    cluster: Cluster
    global_batch: int
    world_size: int | None = None
    memory_bytes: int | None = None
    given: Constraints = field(default_factory=Constraints)
    frozen: FrozenParts | None = None

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.profiles)

    @property
    def world(self) -> int:
        return self.cluster.num_ranks if self.world_size is None else self.world_size

    @property
    def limit_bytes(self) -> int:
        """What a rank may hold."""
        return self.cluster.memory_bytes if self.memory_bytes is None else self.memory_bytes

    def chosen(self, choice: Choice) -> Job:
        """The job as a choice runs it; what is recomputed is open unless it is given."""
        return Job(
            profile=self.sizes.at(choice.microbatch_size),
            cluster=self.cluster,
            pipeline_ranks=choice.pipeline_ranks,
            microbatches=choice.microbatches,
            data_parallel=choice.data_parallel,
            layout=choice.layout,
            memory_bytes=self.limit_bytes,
            rules=self.given.rules(choice.zero_stage),
            recompute="auto" if self.given.recompute is None else self.given.recompute,
            frozen=() if self.frozen is None else self.frozen.at(choice.microbatch_size),
        )

    def check(self) -> None:
        """Raise a :class:`ConfigError` for what no choice can run with."""
        check_counts(**{"world size": self.world, "global batch": self.global_batch})
        if self.global_batch > MOST_SAMPLES:
            raise ConfigError(
                f"global batch: expected at most {MOST_SAMPLES} samples a step, found {self.global_batch}"
            )
        check_cluster(self.cluster, self.world, "world size:")
        schedule = self.given.schedule
        if schedule != "auto" and schedule not in GENERATORS:
            raise ConfigError(not_available(schedule))
        dtype = self.sizes.smallest.dtype
        if self.given.backbone_steps == "each" and not may_step_apart(dtype):
            raise ConfigError(
                f'backbone steps: "each": expected profiles in float32 or bfloat16, found {dtype}; use "together"'
            )
        for part in () if self.frozen is None else self.frozen.parts:
            if part.ranks is not None:
                raise ConfigError(
                    f"frozen part {part.name!r}: ranks: expected none, as the number of ranks is to be chosen, found "
                    f"{list(part.ranks)}"
                )
