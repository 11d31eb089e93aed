"""Cuts of several backbones that share their ranks: each exactly, given the others, until none gets better.

The load of a rank is the sum over backbones. What one of them leaves uneven, the next one fills: the programs of
``nested.py`` and ``contiguous.py`` count what a rank has besides. Several starts, as such a descent may end early: two
boundaries that only together make it better are never moved. So pairs of them are, at each end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from deepspeed_pulse.ir.placement import Kind, Placement
from deepspeed_pulse.planner.cost import Floats
from deepspeed_pulse.planner.job import Job
from deepspeed_pulse.planner.partition.cut_costs import CutCosts, in_flight
from deepspeed_pulse.planner.partition.cuts import best_partition
from deepspeed_pulse.planner.partition.lexicographic import Cuts

_ROUNDS = 12
"""Of a descent; most end after three."""

_STARTS, _FEWER_STARTS = 24, 4
"""Descents of models of up to ``_MANY_LAYERS``, and of larger ones, whose cuts take seconds."""

_MANY_LAYERS = 120
_REACH = 3
"""Layers that a boundary of such a pair moves at most."""

_LEAST_MS = 1e-9
"""By which a pair makes the largest load smaller."""

_UNEVEN = 0.3
"""How much more or less than its even share a rank has of other backbones, as starts suppose."""


def joint_partition(job: Job, placement: Placement, *, tolerance: float = 0.0) -> Cuts:
    """Boundaries of all backbones' stages: the least loaded of several descents, bytes second.

    Raises:
        InfeasibleError: a backbone has fewer layers than stages.
    """
    parts = [_Part.of(job, index, part) for index, part in enumerate(placement.parts)]
    best: tuple[tuple[float, float, float], _Descent] | None = None
    rng = np.random.default_rng(0)
    for start in range(_STARTS if job.profile.num_layers <= _MANY_LAYERS else _FEWER_STARTS):
        shares = [1 + (rng.uniform(-_UNEVEN, _UNEVEN, job.pipeline_ranks) if start else 0.0) for _ in parts]
        descent = _Descent(parts, job.microbatches, tolerance)
        score = descent.run(start % len(parts), shares)
        # Where bytes may cost balance, they were weighed; a better balance would bring them back.
        if not tolerance:
            score = descent.move_pairs()
        if best is None or score < best[0]:
            best = score, descent
    assert best is not None
    starts = [layers.layers[0] for layers in job.profile.backbones]
    inner = [cut + start for start, cuts in zip(starts, best[1].cuts, strict=True) for cut in cuts[:-1]]
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


@dataclass(frozen=True, slots=True)
class _Move:
    """Of boundary ``at`` of backbone ``index`` to ``cut``, and what that adds to each rank's load."""

    index: int
    at: int
    cut: int
    delta_ms: Floats


class _Descent:
    """Cuts of all parts, each made anew in turn."""

    def __init__(self, parts: Sequence[_Part], microbatches: int, tolerance: float) -> None:
        self.parts, self.microbatches, self.tolerance = parts, microbatches, tolerance
        ranks = parts[0].costs.placement.num_ranks
        self.work = [np.zeros(ranks) for _ in parts]
        self.memory = [np.zeros(ranks) for _ in parts]
        self.cuts: list[Cuts] = [()] * len(parts)

    def run(self, first: int, shares: Sequence[Floats | float]) -> tuple[float, float, float]:
        """Score of the cuts; the part to begin with, and how much of an even share each rank is supposed to have."""
        for index, (part, share) in enumerate(zip(self.parts, shares, strict=True)):
            self.work[index] = self.work[index] * 0 + share * part.costs.work_ms[-1] / len(self.work[index])
        turns = [*range(first, len(self.parts)), *range(first)]
        score: tuple[float, float, float] | None = None
        kept: list[Cuts] = []
        for _ in range(_ROUNDS):
            for index in turns:
                self._cut(index)
            found = self._score()
            if score is not None and found >= score:
                break
            score, kept = found, list(self.cuts)
        assert score is not None
        for index, cuts in enumerate(kept):
            self._take(index, cuts)
        return score

    def move_pairs(self) -> tuple[float, float, float]:
        """Score once one or two boundaries were moved at a time, as long as that makes the largest load smaller.

        No more memory lacks then than before.
        """
        while (found := self._better_pair()) is not None:
            for index, cuts in found.items():
                self._take(index, cuts)
        return self._score()

    def _better_pair(self) -> dict[int, Cuts] | None:
        """Cuts of the backbones that change."""
        loads = np.asarray(sum(self.work))
        excess, largest = self._excess(), float(loads.max())
        moves = [move for index in range(len(self.parts)) for move in self._moves(index)]
        deltas = np.array([np.zeros_like(loads), *(move.delta_ms for move in moves)])
        # Only what takes work from the rank that has most can help.
        first = np.flatnonzero(deltas[:, loads.argmax()] < 0)
        peaks = (loads + deltas[first, None] + deltas[None]).max(axis=2)
        for at in np.argsort(peaks, axis=None, kind="stable"):
            one, other = divmod(int(at), len(deltas))
            if peaks[one, other] >= largest - _LEAST_MS:
                break
            pair = [moves[index - 1] for index in (int(first[one]), other) if index]
            found = self._moved(pair)
            if found is not None and self._excess(found) <= excess:
                return found
        return None

    def _moves(self, index: int) -> Iterator[_Move]:
        """Of one backbone's inner boundaries, with what each does to the ranks' loads."""
        part, cuts = self.parts[index], self.cuts[index]
        work, placement = part.costs.work_ms, part.costs.placement
        for at in range(1, len(cuts) - 1):
            low, high = max(cuts[at - 1] + 1, cuts[at] - _REACH), min(cuts[at + 1] - 1, cuts[at] + _REACH)
            for cut in {*range(low, high + 1)} - {cuts[at]}:
                delta = np.zeros(placement.num_ranks)
                delta[placement[at - 1]] += work[cut] - work[cuts[at]]
                delta[placement[at]] -= work[cut] - work[cuts[at]]
                yield _Move(index, at, cut, part.on_ranks(delta))

    def _take(self, index: int, cuts: Cuts) -> None:
        part = self.parts[index]
        self.cuts[index] = cuts
        self.work[index] = part.on_ranks(part.costs.work_of(cuts))
        self.memory[index] = self._memory_of(part, cuts)

    def _memory_of(self, part: _Part, cuts: Cuts) -> Floats:
        return part.on_ranks(part.costs.memory_of(cuts, in_flight(part.costs.placement, self.microbatches)))

    def _cut(self, index: int) -> None:
        part = self.parts[index]
        others = [at for at in range(len(self.parts)) if at != index]
        work, memory = (sum((row[at] for at in others), np.zeros_like(row[index])) for row in (self.work, self.memory))
        costs = part.costs.beside(work, memory, mirrored=part.mirrored)
        cuts = best_partition(costs, microbatches=self.microbatches, tolerance=self.tolerance).cuts
        self._take(index, cuts)

    def _moved(self, moves: Sequence[_Move]) -> dict[int, Cuts] | None:
        """Cuts with boundaries moved; None where a stage were left without a layer, or one boundary moves twice."""
        found: dict[int, list[int]] = {}
        for move in moves:
            cuts = found.setdefault(move.index, list(self.cuts[move.index]))
            if cuts[move.at] != self.cuts[move.index][move.at]:
                return None
            cuts[move.at] = move.cut
        if any(a >= b for cuts in found.values() for a, b in itertools.pairwise(cuts)):
            return None
        return {index: tuple(cuts) for index, cuts in found.items()}

    def _excess(self, changed: Mapping[int, Cuts] = MappingProxyType({})) -> float:
        """Bytes above the limit on the fullest rank, with the cuts of some backbones changed."""
        limit = self.parts[0].costs.memory_bytes
        memory = list(self.memory)
        for index, cuts in changed.items():
            memory[index] = self._memory_of(self.parts[index], cuts)
        return 0.0 if limit is None else max(0.0, float(np.asarray(sum(memory)).max()) - limit)

    def _score(self) -> tuple[float, float, float]:
        """Bytes above the limit, the largest load in ms, bytes sent."""
        depths = [in_flight(part.costs.placement, self.microbatches) for part in self.parts]
        sent = sum(p.costs.score(c, d).bytes for p, c, d in zip(self.parts, self.cuts, depths, strict=True))
        return self._excess(), round(float(np.asarray(sum(self.work)).max()), 9), sent
