"""What is planned before a side runs: its memory, and where the relayed pipeline is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulated import with_relays

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, SearchOptions, estimate, make_plan
from deepspeed_pulse.planner.job import UNLIMITED_BYTES


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model's layers and the links between the ranks, as measured; ``microbatches`` of a step on each rank."""

    profile: Profile
    cluster: Cluster
    ranks: int
    microbatches: int

    def wave(self) -> str:
        """Why the wave does not fit, recomputing what it can; nothing where it does."""
        try:
            self._plan(self._job(recompute="auto", memory_bytes=None), "wave")
        except InfeasibleError as problem:
            return str(problem) if problem.needed_bytes is None else self._lack(problem.needed_bytes)
        return ""

    def relayed(self) -> tuple[tuple[int, ...], str]:
        """Boundaries that balance time alone, and why 1F1B with relayed skips does not fit under them."""
        even = self._plan(self._job(profile=replace(self.profile, skips=())), "linear")
        plan = self._plan(self._job(), "linear", schedule="1f1b", boundaries=even.boundaries)
        peaks = estimate(with_relays(plan, self.profile), self.profile, self.cluster).peak_bytes
        return even.boundaries, self._lack(max(peaks))

    def data_parallel(self) -> str:
        """Why the whole model does not fit each rank, with its optimizer."""
        return self._lack(self._whole_bytes())

    def alone(self) -> str:
        """Why the whole model does not fit one rank with its gradients, without an optimizer."""
        weights_and_gradients = 2  # times the weights
        spared = (self.profile.state_factor - weights_and_gradients) * self.profile.param_bytes
        return self._lack(self._whole_bytes() - spared)

    def _whole_bytes(self) -> int:
        job = self._job(pipeline_ranks=1, data_parallel=self.ranks, microbatches=self.microbatches)
        plan = self._plan(job, "linear")
        assert plan.estimate is not None
        return max(plan.estimate.peak_bytes)

    def _job(self, **changes: object) -> Job:
        """Of one pipeline over all ranks, memory without a limit."""
        job = Job(
            profile=self.profile,
            cluster=self.cluster,
            pipeline_ranks=self.ranks,
            microbatches=self.microbatches * self.ranks,
            memory_bytes=UNLIMITED_BYTES,
        )
        return replace(job, **changes)

    def _plan(
        self, job: Job, placement: str, *, schedule: str = "auto", boundaries: Sequence[int] | None = None
    ) -> Plan:
        options = SearchOptions(placement=placement, schedule=schedule, boundaries=boundaries, solver_seconds=0)
        return make_plan(job, options)

    def _lack(self, needed_bytes: int) -> str:
        have = self.cluster.memory_bytes
        if needed_bytes <= have:
            return ""
        return f"does not fit: planned {needed_bytes / 1e9:.1f} GB a rank, there are {have / 1e9:.1f} GB"
