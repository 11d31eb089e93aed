"""Cuts of several backbones that share their ranks: each exactly, given the others, until none gets better.

The load of a rank is the sum over backbones. What one of them leaves uneven, the next one fills: the programs of
``nested.py`` and ``contiguous.py`` count what a rank has besides. Several starts, as such a descent may end early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from deepspeed_pulse.ir.placement import Kind, Placement
from deepspeed_pulse.planner.job import Job
from deepspeed_pulse.planner.partition.cut_costs import CutCosts, Floats, in_flight
from deepspeed_pulse.planner.partition.cuts import best_partition
from deepspeed_pulse.planner.partition.lexicographic import Cuts

_ROUNDS = 12
"""Of a descent; most end after three."""

_STARTS, _FEWER_STARTS = 24, 4
"""Descents of models of up to ``_MANY_LAYERS``, and of larger ones, whose cuts take seconds."""

_MANY_LAYERS = 120
_UNEVEN = 0.3
"""How much more or less than its even share a rank has of other backbones, as starts suppose."""


def joint_partition(job: Job, placement: Placement, *, tolerance: float = 0.0) -> Cuts:
    """Boundaries of all backbones' stages: the least loaded of several descents, bytes second.

    Raises:
        InfeasibleError: a backbone has fewer layers than stages.
    """
    parts = [_Part.of(job, index, part) for index, part in enumerate(placement.parts)]
    best: tuple[tuple[float, float, float], list[Cuts]] | None = None
    rng = np.random.default_rng(0)
    for start in range(_STARTS if job.profile.num_layers <= _MANY_LAYERS else _FEWER_STARTS):
        shares = [1 + (rng.uniform(-_UNEVEN, _UNEVEN, job.pipeline_ranks) if start else 0.0) for _ in parts]
        found = _Descent(parts, job.microbatches, tolerance).run(start % len(parts), shares)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    starts = [layers.layers[0] for layers in job.profile.backbones]
    inner = [cut + start for start, cuts in zip(starts, best[1], strict=True) for cut in cuts[:-1]]
    return (*inner, job.profile.num_layers)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One backbone, cut with ranks numbered so that its first stage is on rank 0."""

    costs: CutCosts
    mirrored: bool

    @classmethod
    def of(cls, job: Job, index: int, placement: Placement) -> _Part:
        mirrored = placement.kind is Kind.CUSTOM and placement.mirrored.kind is not Kind.CUSTOM
        own = replace(job, profile=job.profile.part(index))
        return cls(costs=CutCosts(own, placement.mirrored if mirrored else placement), mirrored=mirrored)

    def on_ranks(self, found: Floats) -> Floats:
        """By the ranks' own numbers."""
        return found[::-1] if self.mirrored else found


class _Descent:
    """Cuts of all parts, each made anew in turn."""

    def __init__(self, parts: Sequence[_Part], microbatches: int, tolerance: float) -> None:
        self.parts, self.microbatches, self.tolerance = parts, microbatches, tolerance
        ranks = parts[0].costs.placement.num_ranks
        self.work = [np.zeros(ranks) for _ in parts]
        self.memory = [np.zeros(ranks) for _ in parts]
        self.cuts: list[Cuts] = [()] * len(parts)

    def run(self, first: int, shares: Sequence[Floats | float]) -> tuple[tuple[float, float, float], list[Cuts]]:
        """Score and cuts; the part to begin with, and how much of an even share each rank is supposed to have."""
        for index, (part, share) in enumerate(zip(self.parts, shares, strict=True)):
            self.work[index] = self.work[index] * 0 + share * part.costs.work_ms[-1] / len(self.work[index])
        turns = [*range(first, len(self.parts)), *range(first)]
        score: tuple[float, float, float] | None = None
        for _ in range(_ROUNDS):
            for index in turns:
                self._cut(index)
            found = self._score()
            if score is not None and found >= score:
                break
            score, kept = found, list(self.cuts)
        assert score is not None
        return score, kept

    def _cut(self, index: int) -> None:
        part = self.parts[index]
        others = [at for at in range(len(self.parts)) if at != index]
        work, memory = (sum((row[at] for at in others), np.zeros_like(row[index])) for row in (self.work, self.memory))
        costs = part.costs.beside(work, memory, mirrored=part.mirrored)
        cuts = best_partition(costs, microbatches=self.microbatches, tolerance=self.tolerance).cuts
        depth = in_flight(costs.placement, self.microbatches)
        self.cuts[index] = cuts
        self.work[index] = part.on_ranks(costs.work_of(cuts))
        self.memory[index] = part.on_ranks(costs.memory_of(cuts, depth))

    def _score(self) -> tuple[float, float, float]:
        """Bytes above the limit, the largest load in ms, bytes sent."""
        limit = self.parts[0].costs.memory_bytes
        excess = 0.0 if limit is None else max(0.0, float(sum(self.memory).max()) - limit)  # type: ignore[union-attr]
        depths = [in_flight(part.costs.placement, self.microbatches) for part in self.parts]
        sent = sum(p.costs.score(c, d).bytes for p, c, d in zip(self.parts, self.cuts, depths, strict=True))
        return excess, round(float(sum(self.work).max()), 9), sent  # type: ignore[union-attr]
