"""What a cut costs: prefix sums over layers and skips that the partitioner looks up."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_pulse.ir.communicators import fewest_bytes
from deepspeed_pulse.ir.placement import Kind, Placement
from deepspeed_pulse.ir.plan import stage_of
from deepspeed_pulse.ir.profile import Value
from deepspeed_pulse.planner.cost import Floats, WeightCosts
from deepspeed_pulse.planner.ideal import least_makespan
from deepspeed_pulse.planner.job import Job
from deepspeed_pulse.planner.links import Links, Port

_DIGITS = 9
"""Sums of the same times in another order are equal: ms are compared to 1e-9."""

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True, order=True)
class Score:
    """What partitions are compared by, the first field first. Per microbatch, forward and backward.

    ``excess_bytes``: how far the fullest rank is above the memory limit.
    ``load_ms``: the largest of all ranks' compute and all directed links' bytes/bandwidth: hidden states and named
    values that change ranks, and the gradients of both. Of costs with :meth:`CutCosts.filling` a rank's load also has
    its share of fill and drain.
    ``stage_ms``: the largest stage. ``bytes``: all that changes ranks.
    """

    excess_bytes: float
    load_ms: float
    stage_ms: float
    bytes: float


class CutCosts:
    """A job's layers and values, for partitioning onto a placement of its ranks.

    ``in_flight`` in its methods: per stage, how many microbatches' activations count against memory.
    """

    def __init__(self, job: Job, placement: Sequence[int]) -> None:
        profile, self._weights = job.profile, WeightCosts(job.profile, job.rules, job.data_parallel)
        self.profile, self.placement = profile, Placement(placement)
        self.memory_bytes: int | None = job.limit_bytes - max(fewest_bytes(job.grid, self.placement, job.cluster))
        self.num_layers = profile.num_layers
        self.collocates = self.placement.kind is Kind.WAVE
        """Whether the placement is meant to keep both ends of a value on one rank."""
        self.work_ms = _prefix([x.forward_ms + x.backward_ms for x in profile.layers])
        self.param_bytes = _prefix([x.param_bytes for x in profile.layers])
        self.frozen_bytes = _prefix([x.frozen_bytes for x in profile.layers])
        self.activations = _prefix([x.activation_bytes for x in profile.layers])
        self.cut_bytes = np.array([0.0] + [float(x.output_bytes) for x in profile.layers])
        """Hidden state that crosses a cut before a layer, one way."""
        self.values = profile.values
        lone = [value for value in self.values if len(value.targets) == 1]
        self.paired = _nested(_over_the_turn(lone, self.work_ms))
        """Values whose ends belong on one rank; all others are sent wherever the cuts part them."""
        links, ranks = Links(job.cluster, job.grid), range(job.pipeline_ranks)
        self.beside_ms, self.beside_bytes = np.zeros(self.placement.num_ranks), np.zeros(self.placement.num_ranks)
        """Work and memory that each rank has besides: of other backbones."""
        self.clean = False
        """Whether only cuts that part none of these count."""
        self.fill = 0.0
        """Of the work before a stage, what counts as its rank's load (:meth:`filling`)."""
        self.least_work = 1 / self.placement.num_ranks
        """Of all work, what the most loaded rank has at least."""
        self._slow = np.array([[links.between(a, b).transfer_ms(1) if a != b else 0.0 for b in ranks] for a in ranks])
        """ms a byte, per directed pair of ranks."""
        numbers: dict[Port, int] = {}
        self._ports = np.array([[numbers.setdefault(links.port(a, b), len(numbers)) for b in ranks] for a in ranks])
        """What messages leave through, per directed pair."""

    def without_memory(self) -> CutCosts:
        """The same, with no memory limit."""
        free = copy.copy(self)
        free.memory_bytes = None
        return free

    def beside(self, work_ms: Floats, num_bytes: Floats, *, mirrored: bool) -> CutCosts:
        """The same on ranks that hold stages of other backbones, too.

        ``mirrored``: the ranks are numbered the other way round here; what is given is by their own numbers.
        """
        other, way = copy.copy(self), slice(None, None, -1 if mirrored else 1)
        other.beside_ms, other.beside_bytes = work_ms[way], num_bytes[way]
        other._slow, other._ports = self._slow[way, way], self._ports[way, way]
        return other

    def work_of(self, boundaries: Sequence[int]) -> Floats:
        """ms of each rank per microbatch, other backbones' apart."""
        work = np.diff(self.work_ms[list(boundaries)])
        return np.asarray(
            np.bincount(self.placement, weights=work, minlength=self.placement.num_ranks), dtype=np.float64
        )

    def memory_of(self, boundaries: Sequence[int], in_flight: Sequence[int]) -> Floats:
        """State with activations in flight, or the optimizer's step, of each rank, bytes; other backbones' apart."""
        cuts, ranks = list(boundaries), self.placement.num_ranks

        def of_ranks(stages: Floats) -> Floats:
            return np.asarray(np.bincount(self.placement, weights=stages, minlength=ranks), dtype=np.float64)

        kept = of_ranks(np.diff(self.activations[cuts]) * in_flight)
        params, frozen = (of_ranks(np.diff(sums[cuts])) for sums in (self.param_bytes, self.frozen_bytes))
        return self.held(params, frozen, kept)

    def held(self, param_bytes: Floats, frozen_bytes: Floats, activation_bytes: Floats) -> Floats:
        """Memory of ranks with such weights and, unless the optimizer steps, such activations."""
        step = self._weights.step(param_bytes)
        return np.asarray(self._weights.state(param_bytes) + frozen_bytes + np.maximum(activation_bytes, step))

    def filling(self, microbatches: int) -> CutCosts:
        """The same with loads that count fill and drain: no step of whole backwards is shorter than so many times that.

        A stage and the later ones of its rank run between the first microbatch's forward and the last one's backward of
        all stages before it (``planner/ideal.py``).
        """
        other = copy.copy(self)
        other.fill, other.least_work = 1 / microbatches, least_makespan(self.placement, microbatches) / microbatches
        return other

    def binding(self, values: Sequence[Value]) -> CutCosts:
        """The same with other paired values, which no cuts may part."""
        other = copy.copy(self)
        other.paired, other.clean = tuple(values), True
        return other

    def ms_per_byte(self, stage: int) -> float:
        """Of the slower direction between a stage and the one before it; 0 on one rank."""
        before, here = self.placement[stage - 1], self.placement[stage]
        return float(max(self._slow[before, here], self._slow[here, before]))

    @property
    def ideal_ms(self) -> float:
        """No cuts have a smaller load: an even split, or the largest layer."""
        even = self.least_work * (self.work_ms[-1] + self.beside_ms.sum())
        return float(max(even, np.diff(self.work_ms).max(), self.beside_ms.max()))

    def parts(self, boundaries: Sequence[int]) -> bool:
        """Does any paired value change ranks?"""
        ends = ([stage_of(boundaries, layer) for layer in (v.source, v.targets[0])] for v in self.paired)
        return any(self.placement[a] != self.placement[b] for a, b in ends)

    def score(self, boundaries: Sequence[int], in_flight: Sequence[int]) -> Score:
        """The true score of cuts, any placement."""
        cuts = list(boundaries)
        work = np.diff(self.work_ms[cuts])
        full = self.memory_of(cuts, in_flight) + self.beside_bytes
        traffic = self.traffic(enumerate(itertools.pairwise(cuts)))
        return Score(
            excess_bytes=0.0 if self.memory_bytes is None else max(0.0, float(full.max()) - self.memory_bytes),
            load_ms=round(float(max(self._busy_ms(cuts), self.link_ms(traffic))), _DIGITS),
            stage_ms=round(float(work.max()), _DIGITS),
            bytes=float(sum(traffic.values())),
        )

    def _busy_ms(self, cuts: list[int]) -> float:
        """Of the busiest rank: compute, with fill and drain where they count."""
        work, before = np.diff(self.work_ms[cuts]), self.fill * self.work_ms[cuts[:-1]]
        if not self.fill:
            return float((self.work_of(cuts) + self.beside_ms).max())
        later = [0.0] * self.placement.num_ranks
        busiest = 0.0
        for stage in reversed(range(len(work))):
            rank = self.placement[stage]
            later[rank] += work[stage]
            busiest = max(busiest, later[rank] + before[stage])
        return busiest

    def link_ms(self, traffic: Mapping[Pair, float]) -> float:
        """Of the busiest directed link, or port that several leave through."""
        busy: dict[int, float] = defaultdict(float)
        for pair, size in traffic.items():
            busy[self._ports[pair]] += size * self._slow[pair]
        return max(busy.values(), default=0.0)

    def traffic(self, stages: Iterable[tuple[int, tuple[int, int]]]) -> dict[Pair, float]:
        """Bytes per directed pair of ranks, from (stage, (first layer, end)).

        Of some stages only, it is what passes among them whatever the others hold.
        """
        busy: dict[Pair, float] = {}
        known = dict(stages)
        home = {layer: stage for stage, (first, end) in known.items() for layer in range(first, end)}
        for stage, (first, _) in known.items():
            before = self.placement.before(stage)
            if before in known:
                self._add(busy, before, stage, self.cut_bytes[first], True)
        whole = len(known) == len(self.placement)
        for value in self.values:
            if value.source in home and (whole or all(target in home for target in value.targets)):
                for source, target in self._hops(home[value.source], sorted({home[t] for t in value.targets})):
                    self._add(busy, source, target, value.bytes, value.gradient)
        return busy

    def _add(self, busy: dict[Pair, float], source: int, target: int, size: float, gradient: bool) -> None:
        there, here = self.placement[source], self.placement[target]
        if there != here:
            busy[there, here] = busy.get((there, here), 0.0) + size
            if gradient:
                busy[here, there] = busy.get((here, there), 0.0) + size

    def _hops(self, source: int, consumers: Sequence[int]) -> Iterator[Pair]:
        """Stages (from, to) of each hop: from rank to rank in stage order, each rank once."""
        holder, visited = source, {self.placement[source]}
        for stage in consumers:
            if self.placement[stage] not in visited:
                yield holder, stage
                visited.add(self.placement[stage])
                holder = stage


def _prefix(numbers: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(numbers, dtype=np.float64))])


def _over_the_turn(pairs: Sequence[Value], work_ms: Floats) -> tuple[Value, ...]:
    """Of values with one consumer, those that jump over the layer that most of them jump over.

    There a wave turns, and only mirror stages can hold both ends of such a value. One that begins and ends on the
    same side (the residual of a transformer cut into its blocks) is local unless a cut falls between; then it goes
    to the next stage beside the hidden state, and is worth no more than its bytes. Of several such layers the one
    nearest to the middle of the work inside the values that jump over all of them.
    """
    jumps = Counter(layer for value in pairs for layer in range(value.source + 1, value.targets[0] + 1))
    fullest = [layer for layer in sorted(jumps) if jumps[layer] == max(jumps.values())]
    if not fullest:
        return tuple(pairs)
    around = [value for value in pairs if value.source < fullest[0] and fullest[-1] <= value.targets[0]]
    first = max((value.source for value in around), default=0)
    last = min((value.targets[0] for value in around), default=len(work_ms) - 1)
    middle = (work_ms[first] + work_ms[last]) / 2
    turn = min(fullest, key=lambda layer: abs(float(work_ms[layer] - middle)))
    return tuple(value for value in pairs if value.source < turn <= value.targets[0])


def _nested(pairs: Sequence[Value]) -> tuple[Value, ...]:
    """Of all ways to choose values that lie inside one another, the one with most bytes.

    Mirror stages hold both ends of such values at any number of cuts; one that crosses many others costs balance, and
    would part those for whose sake the wave is there. ``most[i]``: of the choices whose innermost value is i.
    """
    inwards = sorted(pairs, key=lambda value: (value.source, -value.targets[0]))
    most: list[float] = []
    around: list[int | None] = []
    for value in inwards:
        outer = [i for i in range(len(most)) if inwards[i].targets[0] >= value.targets[0]]
        best = max(outer, key=lambda i: most[i], default=None)
        around.append(best)
        most.append(value.both_ways + (0.0 if best is None else most[best]))
    chosen: list[Value] = []
    at = max(range(len(most)), key=lambda i: most[i], default=None)
    while at is not None:
        chosen.append(inwards[at])
        at = around[at]
    return tuple(value for value in pairs if value in chosen)


def in_flight(placement: Placement, microbatches: int) -> tuple[int, ...]:
    """Microbatches whose activations a 1F1B-like order keeps, per stage.

    Linear: P - s. Wave: S - 1 - s on the way down and S - s on the way up, over the number of waves, so that a rank
    of a V holds 2 P half-stages in all.
    """
    stages = len(placement)
    if placement.kind is Kind.WAVE:
        depth = [-(-(stages - s - (2 * s < stages)) // placement.waves) for s in range(stages)]
    else:
        depth = [stages - s for s in range(stages)]
    return tuple(max(1, min(microbatches, d)) for d in depth)
