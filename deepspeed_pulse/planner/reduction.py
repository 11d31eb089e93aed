"""Summing a stage's gradients over its data-parallel peers: how long that takes, and how much of it has to wait."""

from __future__ import annotations

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.layout import Grid
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner.cost import optimizer_shards
from deepspeed_pulse.planner.links import Links
from deepspeed_pulse.planner.problem import Problem


def reduction_ms(problem: Problem, stage: int) -> float:
    """Ring all-reduce of a stage's gradients over its data-parallel peers."""
    return problem.links.reduction_ms(problem.placement[stage], problem.costs.param_bytes[stage])


def least_reduction_ms(profile: Profile, cluster: Cluster, grid: Grid) -> float:
    """Of all gradients over data-parallel peers, if the ranks that sum fastest had them all."""
    links = Links(cluster, grid)
    return min(links.least_reduction_ms(rank, profile.param_bytes) for rank in range(grid.pipeline_ranks))


def summed_share(rules: Rules) -> float:
    """Of an all-reduce, what comes before the optimizer's step: one of ZeRO-1 only scatters."""
    return 0.5 if rules.shards_optimizer else 1.0


def gathered_share(profile: Profile, rules: Rules, replicas: int) -> float:
    """What comes after it: weights are gathered where peers share optimizer state."""
    return 0.5 if optimizer_shards(profile, rules, replicas) > 1 else 0.0


def pieces(problem: Problem, stage: int, start_ms: float, end_ms: float) -> tuple[tuple[float, float], ...]:
    """When a stage's gradients are whole and how long to sum them takes: (ms, ms), first to last.

    ``start_ms``, ``end_ms``: of the stage's last backward. Summed early, gradients leave while it runs, in buckets.
    """
    span = end_ms - start_ms
    return tuple((end_ms - (1.0 - share) * span, ms) for share, ms in problem.buckets[stage])
