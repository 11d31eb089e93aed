"""A plan made anywhere, against the profile and the cluster it shall run with: every violation, with the place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.plan import Estimate, Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner.checks.validate import marked_rows, violations
from deepspeed_pulse.planner.problem import Problem, other_backbones
from deepspeed_pulse.planner.simulator import at_peak, run, summarize

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
    estimate: Estimate | None = None


def audit(plan: Plan, profile: Profile, cluster: Cluster) -> Audit:
    """Every violation of a plan: its form, routes, order, deadlock, and memory against ``cluster.memory_bytes``.

    Memory is simulated, so it is looked at only when the plan can run.
    """
    about_files = tuple(_files(plan, profile, cluster))
    found = violations(plan, num_layers=profile.num_layers, values=profile.values)
    other = None if found else other_backbones(plan, profile.backbones, f"the profile {profile.name!r}")
    found += [] if other is None else [f"backbones: {other}; plan it anew from this profile"]
    if found or plan.grid.num_ranks > cluster.num_ranks:
        return Audit(problems=(*about_files, *found), rows=tuple(marked_rows(plan)))
    problem = Problem(plan, profile, cluster)
    timeline = run(problem, plan.schedule)
    estimate = summarize(problem, timeline)
    problems, positions = list(about_files), dict[int, set[int]]()
    for rank, peak in enumerate(estimate.peak_bytes):
        if peak > cluster.memory_bytes:
            line, positions[rank] = _too_full(problem, timeline, rank, peak)
            problems.append(line)
    return Audit(problems=tuple(problems), rows=tuple(marked_rows(plan, positions)), estimate=estimate)


def _files(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Where plan, profile and cluster contradict each other or themselves."""
    if plan.profile_fingerprint not in (None, profile.fingerprint):
        yield (
            f"profile_fingerprint: the plan was made from another profile: expected {plan.profile_fingerprint}, "
            f"{profile.name!r} has {profile.fingerprint}"
        )
    if plan.microbatch_size != profile.microbatch_size:
        taken = profile.microbatch_size
        yield f"microbatch_size: the plan has {plan.microbatch_size}, the profile was taken with {taken}"
    if plan.grid.num_ranks > cluster.num_ranks:
        yield (
            f"ranks: {plan.pipeline_ranks} pipeline ranks x {plan.data_parallel} data parallel = "
            f"{plan.grid.num_ranks}, the cluster {cluster.name!r} has {cluster.num_ranks}"
        )


def _too_full(problem: Problem, timeline: Timeline, rank: int, peak: int) -> tuple[str, set[int]]:
    """A line about a rank that does not fit; and its action that runs when most is live, or the last one before."""
    at_ms, live = max(timeline.memory[rank], key=lambda point: point[1], default=(0.0, 0))
    started = [i for i, span in enumerate(timeline.spans_of(rank)) if span.start_ms <= at_ms]
    action = f", at {problem.plan.schedule[rank][started[-1]]}" if started else ""
    where = f"at {at_ms:.4g} ms{action}"
    if "live" not in at_peak(problem, rank, {"live": live}):
        where, started = "in the optimizer's step", []
    return (
        f"memory of rank {rank}: needs {peak / _GB:.3f} GB {where}; the "
        f"cluster's memory_bytes allows {problem.cluster.memory_bytes / _GB:.3f} GB"
    ), set(started[-1:])
