"""Frozen work assigned to gaps by a mixed-integer program: actions keep their times, what runs in which gap is free.

Microbatches that have come equally far are interchangeable, so the program counts them. A microbatch enters a gap with
``a`` layers done and leaves it with ``b``; until the gap is over, nobody else has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_pulse.ir.fill import Filling, FrozenPart, FrozenRun
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.planner.filling.greedy import Runs
from deepspeed_pulse.planner.mip import Mip, Term
from deepspeed_pulse.planner.problem import Problem

MOST_COLUMNS = 8000
"""Larger programs are not tried: few improve within seconds."""

_VISIT_COST = 1e-4
"""Of a microbatch's stay in a gap, as a share of all frozen work: among equals, the fewest messages."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A rank's time before its action number ``position``; the one after its last action has no end."""

    rank: int
    position: int
    start_ms: float
    end_ms: float
    is_last: bool


def gaps_of(timeline: Timeline, shortest_ms: float) -> list[Gap]:
    """Where no action runs for at least ``shortest_ms``, in the order of starts; frozen work counts as idle."""
    found = []
    for rank in range(timeline.num_ranks):
        spans, free = timeline.spans_of(rank), 0.0
        for position, span in enumerate(spans):
            if span.start_ms - free >= shortest_ms:
                found.append(Gap(rank=rank, position=position, start_ms=free, end_ms=span.start_ms, is_last=False))
            free = span.end_ms
        found.append(Gap(rank=rank, position=len(spans), start_ms=free, end_ms=float("inf"), is_last=True))
    return sorted(found, key=lambda gap: (gap.start_ms, gap.rank))


class Assignment:
    """The program. Per gap g, part p and number of layers l, all integers:

    * ``into[g,p,l]``, ``out[g,p,l]``: microbatches that enter and leave with l layers done;
    * ``runs[g,p,l]``: microbatches whose layer l runs in the gap.
    """

    def __init__(
        self,
        problem: Problem,
        parts: Sequence[FrozenPart],
        allowed: Mapping[str, Sequence[int]],
        gaps: Sequence[Gap],
        upper_ms: float,
    ) -> None:
        self.problem, self.parts, self.gaps = problem, parts, gaps
        self.microbatches, self.upper_ms = problem.plan.microbatches, upper_ms
        self.places = [(g, part) for g, gap in enumerate(gaps) for part in parts if gap.rank in allowed[part.name]]
        self.num_columns = sum(3 * len(part.layers) for _, part in self.places)

    def solve(self, seconds: float) -> Runs | None:
        """Frozen runs of the best assignment found; None when there is none, or parts would wait for each other."""
        program = Mip(seconds=seconds, mip_rel_gap=1e-4, random_seed=0)
        self.end = program.column(0.0, self.upper_ms, cost=1.0)
        self._columns(program)
        for terms, low, high in self._rows():
            program.row(terms, low, high)
        values = program.solve()
        return None if values is None else self._runs([round(value) for value in values])

    def _columns(self, program: Mip) -> None:
        work = sum(part.forward_ms for part in self.parts) * self.microbatches
        most = self.microbatches
        self.into: dict[tuple[int, str, int], int] = {}
        self.out: dict[tuple[int, str, int], int] = {}
        self.runs: dict[tuple[int, str, int], int] = {}
        for g, part in self.places:
            for layer, cost in enumerate(part.layers):
                key, room = (g, part.name, layer), self.gaps[g].end_ms - self.gaps[g].start_ms
                fits = most if cost.forward_ms <= room + 1e-9 else 0
                self.into[key] = program.column(0, fits, cost=_VISIT_COST * work / most, integer=True)
                self.runs[key] = program.column(0, fits, integer=True)
                self.out[g, part.name, layer + 1] = program.column(0, most, integer=True)

    def _rows(self) -> Iterator[tuple[list[Term], float | None, float | None]]:
        yield from self._kept()
        yield from self._room()
        yield from self._pool()
        for part in self.parts:
            mine = [(g, len(p.layers)) for g, p in self.places if p.name == part.name]
            entered = [(self.into[g, part.name, 0], 1.0) for g, _ in mine]
            left = [(self.out[g, part.name, last], 1.0) for g, last in mine]
            yield from ((terms, self.microbatches, self.microbatches) for terms in (entered, left))

    def _kept(self) -> Iterator[tuple[list[Term], float, float]]:
        """Who enters before a layer or ran the one before runs it, or leaves: into + runs' = runs + out."""
        for g, part in self.places:
            for layer in range(len(part.layers) + 1):
                terms = []
                if layer < len(part.layers):
                    terms += [(self.into[g, part.name, layer], 1.0), (self.runs[g, part.name, layer], -1.0)]
                if layer:
                    terms += [(self.runs[g, part.name, layer - 1], 1.0), (self.out[g, part.name, layer], -1.0)]
                yield terms, 0.0, 0.0

    def _room(self) -> Iterator[tuple[list[Term], float | None, float | None]]:
        """ms of all that runs in a gap <= its length; start of a rank's last gap + ms of all in it <= end."""
        found: dict[int, list[Term]] = defaultdict(list)
        for g, part in self.places:
            found[g] += [(self.runs[g, part.name, i], x.forward_ms) for i, x in enumerate(part.layers)]
        for g, terms in found.items():
            gap = self.gaps[g]
            if gap.is_last:
                yield [(self.end, 1.0), *((column, -ms) for column, ms in terms)], gap.start_ms, None
            else:
                yield terms, None, gap.end_ms - gap.start_ms

    def _pool(self) -> Iterator[tuple[list[Term], float | None, float | None]]:
        """Entered with l layers done by a time <= left with l done, and arrived, by then (for l = 0: all needed)."""
        for g, part in self.places:
            gap = self.gaps[g]
            earlier = [h for h, p in self.places if p.name == part.name and h <= g]
            for layer in range(len(part.layers)):
                entered = [(self.into[h, part.name, layer], -1.0) for h in earlier]
                if layer:
                    yield [*entered, *self._left(part, layer, gap)], 0.0, None
                    continue
                for name in part.needs:
                    other = next(p for p in self.parts if p.name == name)
                    yield [*entered, *self._left(other, len(other.layers), gap)], 0.0, None

    def _left(self, part: FrozenPart, done: int, at: Gap) -> list[Term]:
        mine = ((h, self.gaps[h]) for h, p in self.places if p.name == part.name)
        return [
            (self.out[h, part.name, done], 1.0)
            for h, gap in mine
            if self._there_in_time(gap.rank, gap.end_ms, part, done, at)
        ]

    def _there_in_time(self, rank: int, ready_ms: float, part: FrozenPart, done: int, gap: Gap) -> bool:
        """What the first ``done`` layers gave on a rank (-1: nothing is needed) is on the gap's when that begins."""
        if rank not in (-1, gap.rank):
            way = self.problem.links.between(rank, gap.rank)
            ready_ms = ready_ms + way.transfer_ms(part.layers[done - 1].output_bytes) + way.latency_ms
        return ready_ms <= gap.start_ms + 1e-9

    def _runs(self, values: Sequence[int]) -> Runs | None:
        """Counts as runs of microbatches: of those that are there, the first."""
        found: list[list[Filling]] = [[] for _ in range(self.problem.num_ranks)]
        there: dict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
        """Per part and layers done: microbatch, rank, and when it may be read there."""
        for part in self.parts:
            there[part.name, 0] = [(m, -1, 0.0) for m in range(self.microbatches)]
        for g, part in sorted(self.places, key=lambda place: (place[0], self.parts.index(place[1]))):
            gap = self.gaps[g]
            for first, end in self._visits(g, part, values):
                chosen = self._first_there(there, part, first, gap)
                if chosen is None:
                    return None
                there[part.name, first].remove(chosen)
                there[part.name, end].append((chosen[0], gap.rank, gap.end_ms))
                found[gap.rank].append(Filling(gap.position, FrozenRun(part.name, first, end, chosen[0])))
        return tuple(tuple(row) for row in found)

    def _visits(self, g: int, part: FrozenPart, values: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(first layer, end) of each microbatch's stay in a gap: who came first leaves first."""
        inside: list[int] = []
        for layer in range(len(part.layers) + 1):
            if layer < len(part.layers):
                inside += [layer] * values[self.into[g, part.name, layer]]
            for _ in range(values[self.out[g, part.name, layer]] if layer else 0):
                first = inside.pop(0)
                if first < layer:  # else it came and went, as solutions cut off by the time limit may have it
                    yield first, layer

    def _first_there(
        self, there: Mapping[tuple[str, int], list[tuple[int, int, float]]], part: FrozenPart, done: int, gap: Gap
    ) -> tuple[int, int, float] | None:
        """Here already before elsewhere, then the first microbatch; only ones whose needs are met."""
        fit = [item for item in there[part.name, done] if self._there_in_time(*item[1:], part, done, gap)]
        for other in self.parts:
            if done or other.name not in part.needs:
                continue
            ends, last = there[other.name, len(other.layers)], len(other.layers)
            ready = {item[0] for item in ends if self._there_in_time(*item[1:], other, last, gap)}
            fit = [item for item in fit if item[0] in ready]
        return min(fit, key=lambda item: (item[1] != gap.rank, item[0]), default=None)
