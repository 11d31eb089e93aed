"""Frozen work put into idle time, in the order of time (DiffusionPipe, arXiv 2405.01248, section 5.2).

When a rank has nothing to do until its next action, it takes of the frozen layers that are ready the longest run of
consecutive ones that fits before the action. What fits nowhere runs after the rank's last action. A microbatch may go
on on another rank than it began on, where its last result then travels; it does so when the other rank has time.

The limit is when the action must have started for the step to end in time; that it starts when it would without frozen
work, as in DiffusionPipe, is the special case without slack.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_pulse.ir.dependencies import walk
from deepspeed_pulse.ir.fill import Filling, FrozenPart, FrozenRun
from deepspeed_pulse.ir.program import Message, Step
from deepspeed_pulse.ir.schedule import FORWARDS, Action, Op
from deepspeed_pulse.planner.links import Ports
from deepspeed_pulse.planner.problem import Problem

_EPSILON_MS = 1e-9
_NEVER = float("inf")

MOST_OPEN = 2
"""A rank begins a microbatch of a part only while it holds fewer of that part that are begun and not ended."""

Runs = tuple[tuple[Filling, ...], ...]
"""Per rank, frozen runs at their positions; hand-overs are not there yet."""


def latest_starts(problem: Problem, end_ms: float) -> dict[Action, float]:
    """When each action must start so that the plan's order ends by ``end_ms``; queues on links are not counted."""
    plan = problem.plan
    order, _ = walk(problem.lower(plan.schedule), plan.placement)
    following = {a: b for row in plan.schedule for a, b in itertools.pairwise(row)}
    latest: dict[Action, float] = {}
    for _, step in reversed(order):
        assert isinstance(step, Step)
        action = step.action
        ends = [end_ms]
        if action in following:
            ends.append(latest[following[action]])
        for message in step.sends:
            way, taker = problem.way(message), _taker(problem.reader_of(message, action.op), latest)
            ends.append(latest[taker] - way.transfer_ms - way.latency_ms)
        latest[action] = min(ends) - problem.duration_ms(action)
    return latest


def _taker(reader: Action, known: Container[Action]) -> Action:
    """The action that takes what another sends; one may be whole where the other is a half."""
    ops = (reader.op,) if reader.op in FORWARDS else (Op.BACKWARD, Op.INPUT_GRAD)
    return next(taker for op in ops if (taker := Action(reader.stage, op, reader.microbatch)) in known)


@dataclass
class Chain:
    """A part's layers for one microbatch, and how far they are. ``rank``: where the last one ran."""

    part: FrozenPart
    microbatch: int
    ends_ms: list[float]
    """Time from the first layer's start to the end of each."""
    done: int = 0
    rank: int | None = None
    ready_ms: float = 0.0

    @property
    def left_ms(self) -> float:
        return self.ends_ms[-1] - self._before

    @property
    def _before(self) -> float:
        return self.ends_ms[self.done - 1] if self.done else 0.0

    def fitting(self, room_ms: float) -> int:
        """How many of the layers that are left fit into ``room_ms``."""
        return bisect_right(self.ends_ms, self._before + room_ms + _EPSILON_MS) - self.done

    def length_ms(self, count: int) -> float:
        return self.ends_ms[self.done + count - 1] - self._before if count else 0.0


@dataclass(frozen=True, kw_only=True)
class Preference:
    """What a rank prefers where several microbatches fit: a weighted sum, the largest is taken.

    ``fit``: ms that it fills; ``left``: ms that the microbatch has left; ``here``: for one that needs no message, as a
    share of all ms of its part.
    """

    fit: float = 1.0
    left: float = 0.0
    here: float = 0.1


@dataclass
class Filler:
    """One pass over time.

    ``parts`` come in an order in which they can run; ``allowed``: per part, the ranks that may run it; ``latest``: per
    action, when it must have started; ``begin_ms``: when each rank has time for the first time, empty: at 0.
    """

    problem: Problem
    parts: Sequence[FrozenPart]
    allowed: Mapping[str, Sequence[int]]
    latest: Mapping[Action, float]
    preference: Preference = field(default_factory=Preference)
    begin_ms: Sequence[float] = ()

    def __post_init__(self) -> None:
        plan = self.problem.plan
        self._rows = self.problem.lower(plan.schedule)
        self._chains = [
            Chain(part, m, list(itertools.accumulate(layer.forward_ms for layer in part.layers)))
            for m in range(plan.microbatches)
            for part in self.parts
        ]
        self._of = {(chain.part.name, chain.microbatch): chain for chain in self._chains}
        self._arrived: dict[Message, float] = {}
        self._ports = Ports()
        self._position = [0] * plan.pipeline_ranks
        self._free_ms = list(self.begin_ms) or [0.0] * plan.pipeline_ranks
        self._runs: list[list[Filling]] = [[] for _ in range(plan.pipeline_ranks)]
        self._events: list[tuple[float, int]] = [(free, rank) for rank, free in enumerate(self._free_ms)]

    def fill(self) -> Runs:
        """Frozen runs of every rank."""
        heapq.heapify(self._events)
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now >= self._free_ms[rank] - _EPSILON_MS:
                self._go_on(rank, now)
        assert all(chain.done == len(chain.ends_ms) for chain in self._chains), "frozen work that waits for itself"
        return tuple(tuple(row) for row in self._runs)

    def _go_on(self, rank: int, now: float) -> None:
        row, at = self._rows[rank], self._position[rank]
        step = row[at] if at < len(row) else None
        arrival = limit = _NEVER
        if step is not None:
            arrival = max((self._arrived.get(message, _NEVER) for message in step.receives), default=0.0)
            limit = self.latest[step.action]
            if arrival <= now + _EPSILON_MS:
                self._run_step(rank, step, now)
                return
        chosen = self._choose(rank, now, limit - now)
        if chosen is not None:
            self._run_layers(rank, chosen, now, arrival, limit)
        elif arrival < _NEVER:
            self._wake(arrival, rank)

    def _wake(self, time: float, rank: int) -> None:
        heapq.heappush(self._events, (time, rank))

    def _run_step(self, rank: int, step: Step, now: float) -> None:
        self._position[rank] += 1
        end = self._free_ms[rank] = now + self.problem.duration_ms(step.action)
        self._wake(end, rank)
        for message in step.sends:
            way = self.problem.way(message)
            _, self._arrived[message] = self._ports.send(way, end)
            self._wake(self._arrived[message], way.target)

    def _choose(self, rank: int, now: float, room_ms: float) -> Chain | None:
        """Of the microbatches that are ready and of which a layer fits, the one this rank likes best."""
        best, chosen = 0.0, None
        fresh: set[str] = set()
        held: dict[str, int] = defaultdict(int)
        for chain in self._chains:
            held[chain.part.name] += chain.rank == rank and 0 < chain.done < len(chain.ends_ms)
        for chain in self._chains:
            name = chain.part.name
            if chain.done == len(chain.ends_ms) or chain.ready_ms > now + _EPSILON_MS or rank not in self.allowed[name]:
                continue
            if not chain.done and (name in fresh or held[name] >= MOST_OPEN):
                continue  # one microbatch not yet begun is like another
            if self._on(rank, chain) > now + _EPSILON_MS:
                continue
            if not chain.done:
                fresh.add(name)
            count = chain.fitting(room_ms)
            value = self._value(rank, chain, count) if count else -1.0
            if value > best or (chosen is None and value >= 0):
                best, chosen = value, chain
        return chosen

    def _value(self, rank: int, chain: Chain, count: int) -> float:
        taste, here = self.preference, chain.ends_ms[-1] if chain.rank in (None, rank) else 0.0
        return taste.fit * chain.length_ms(count) + taste.left * chain.left_ms + taste.here * here

    def _on(self, rank: int, chain: Chain) -> float:
        """When everything that the chain's next layer reads is on a rank."""
        ready = self._there(rank, chain)
        for name in chain.part.needs:
            other = self._of[name, chain.microbatch]
            ready = max(ready, self._there(rank, other) if other.done == len(other.ends_ms) else _NEVER)
        return ready

    def _there(self, rank: int, chain: Chain) -> float:
        if not chain.done or chain.rank == rank:
            return chain.ready_ms
        assert chain.rank is not None
        way = self.problem.links.between(chain.rank, rank)
        size = chain.part.layers[chain.done - 1].output_bytes
        return chain.ready_ms + way.transfer_ms(size) + way.latency_ms

    def _run_layers(self, rank: int, chain: Chain, now: float, arrival: float, limit: float) -> None:
        """Layers of one microbatch until the next action can start."""
        first, end = chain.done, now
        while chain.done < len(chain.ends_ms) and chain.fitting(limit - end) and (end < arrival or chain.done == first):
            end += chain.length_ms(1)
            chain.done += 1
        self._record(rank, FrozenRun(chain.part.name, first, chain.done, chain.microbatch))
        chain.rank, chain.ready_ms = rank, end
        self._free_ms[rank] = end
        for other in range(self.problem.num_ranks):
            self._wake(max(end, self._there(other, chain)), other)

    def _record(self, rank: int, run: FrozenRun) -> None:
        """Joined with the run before, where that ended with the layer before at the same place."""
        row, position = self._runs[rank], self._position[rank]
        before = row[-1] if row else None
        if before is not None and before.position == position and isinstance(before.work, FrozenRun):
            work = before.work
            if (work.part, work.microbatch, work.end) == (run.part, run.microbatch, run.first):
                row[-1] = Filling(position, FrozenRun(run.part, work.first, run.end, run.microbatch))
                return
        row.append(Filling(position, run))
