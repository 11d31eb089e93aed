"""A plan made anywhere, against the profile and the cluster it shall run with: every violation, with the place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner.checks.validate import marked_rows, violations
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.routes import named_values
from deepspeed_pulse.planner.simulator import run, summarize

_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What :func:`audit` found.

    Attributes:
        problems: one line each; empty for a sound plan that fits the cluster.
        rows: action lists of the ranks at fault, actions at fault as ``>>2F0<<``.
        estimate: None when the plan cannot be simulated.
    """

    problems: tuple[str, ...]
    rows: tuple[str, ...] = ()
    estimate: Estimate | None = field(default=None)


def audit(plan: Plan, profile: Profile, cluster: Cluster) -> Audit:
    """Every violation of a plan: its form, routes, order, deadlock, and memory against ``cluster.memory_bytes``.

    Memory is simulated, so it is looked at only when the plan can run.
    """
    about_files = tuple(_files(plan, profile, cluster))
    found = violations(plan, num_layers=profile.num_layers, values=named_values(profile))
    enough_ranks = plan.pipeline_ranks * plan.data_parallel <= cluster.num_ranks
    if found or not enough_ranks:
        return Audit(problems=(*about_files, *found), rows=tuple(marked_rows(plan)))
    problem = Problem(plan, profile, cluster)
    timeline = run(problem, plan.schedule)
    estimate = summarize(problem, timeline)
    peaks = _peaks(timeline, estimate, cluster.memory_bytes)
    lines = tuple(peak.describe(plan, timeline, cluster.memory_bytes) for peak in peaks.values())
    rows = marked_rows(plan, {rank: peak.positions(plan, timeline) for rank, peak in peaks.items()})
    return Audit(problems=about_files + lines, rows=tuple(rows), estimate=estimate)


def _files(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Where plan, profile and cluster contradict each other or themselves."""
    if plan.profile_fingerprint not in (None, profile.fingerprint):
        yield (
            f"profile_fingerprint: the plan was made from another profile: expected {plan.profile_fingerprint}, "
            f"{profile.name!r} has {profile.fingerprint}"
        )
    if plan.microbatch_size != profile.microbatch_size:
        yield (
            f"microbatch_size: the plan has {plan.microbatch_size}, the profile was taken with "
            f"{profile.microbatch_size}"
        )
    needed = plan.pipeline_ranks * plan.data_parallel
    if needed > cluster.num_ranks:
        yield (
            f"ranks: {plan.pipeline_ranks} pipeline ranks x {plan.data_parallel} data parallel = {needed}, the cluster "
            f"{cluster.name!r} has {cluster.num_ranks}"
        )


@dataclass(frozen=True)
class _Peak:
    """The fullest moment of a rank that does not fit."""

    rank: int
    peak_bytes: int
    at_ms: float

    def positions(self, plan: Plan, timeline: Timeline) -> set[int]:
        """The rank's action that runs then, or the last one before it."""
        started = [i for i, s in enumerate(timeline.spans_of(self.rank)) if s.start_ms <= self.at_ms]
        return {started[-1]} if started else set()

    def describe(self, plan: Plan, timeline: Timeline, limit: int) -> str:
        at = self.positions(plan, timeline)
        action = f", at {plan.schedule[self.rank][min(at)]}" if at else ""
        return (
            f"memory of rank {self.rank}: needs {self.peak_bytes / _GB:.3f} GB at {self.at_ms:.4g} ms{action}; the "
            f"cluster's memory_bytes allows {limit / _GB:.3f} GB"
        )


def _peaks(timeline: Timeline, estimate: Estimate, limit: int) -> Mapping[int, _Peak]:
    found = {}
    for rank, peak in enumerate(estimate.peak_bytes):
        if peak > limit:
            curve = timeline.memory[rank]
            at = max(curve, key=lambda point: point[1])[0] if curve else 0.0
            found[rank] = _Peak(rank, peak, at)
    return found
