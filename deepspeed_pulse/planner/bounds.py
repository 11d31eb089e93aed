"""A makespan that no schedule can beat, for given cuts, placement and routes.

The largest of (all with messages, queueing only between messages of one action):

* per rank: the preemptive schedule of its actions, each with its own earliest start and tail (Jackson; Carlier 1982),
  where microbatches of a stage stay in order. It is at least one microbatch's way through all stages and back, and at
  least what all actions of the rank take with the shortest head and tail; often it is the optimum;
* per port (a directed link, or a rank's card): earliest start of what leaves through it + M times its bytes + shortest
  tail.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import count, pairwise

from deepspeed_pulse.ir.keys import key_of
from deepspeed_pulse.ir.program import Message
from deepspeed_pulse.ir.schedule import GIVEN_BY, Action, Op
from deepspeed_pulse.planner.links import Port
from deepspeed_pulse.planner.problem import Problem


class CriticalPaths:
    """Longest paths of one microbatch: ``head_ms`` before each action starts, ``tail_ms`` after it ends.

    Where some microbatches run extra forwards first, ``head_ms`` of the others' actions is that of one that does not.
    """

    def __init__(self, problem: Problem, *, split: bool = False) -> None:
        self.problem = problem
        stages, back = range(problem.num_stages), Op.INPUT_GRAD if split else Op.BACKWARD
        extra = {s: problem.plan.extra_forwards(s) for s in stages}
        self._some = {(s, "E"): frozenset(row) for s, row in extra.items() if row}
        """Of the extra forwards of a stage, the microbatches that run them."""
        self.actions = [Action(s, Op.EXTRA_FORWARD, row[0]) for s, row in extra.items() if row]
        self.actions += [Action(s, Op.FORWARD, 0) for s in stages] + [Action(s, back, 0) for s in reversed(stages)]
        self.actions += [Action(s, Op.WEIGHT_GRAD, 0) for s in stages if split]
        self.delays = _message_delays(problem, self.actions)
        self._edges = {_column(a): self._incoming(a) for a in self.actions}
        self._duration = duration = {_column(a): problem.least_ms(a) for a in self.actions}
        self.head_ms: dict[Column, float] = {}
        self.tail_ms: dict[Column, float] = dict.fromkeys(self._edges, 0.0)
        for key, edges in self._edges.items():
            always = [(k, delay) for k, delay in edges if self.runs(k, None) or key in self._some]
            self.head_ms[key] = max((self.head_ms[k] + duration[k] + delay for k, delay in always), default=0.0)
        for key, edges in reversed(self._edges.items()):
            for before, delay in edges:
                self.tail_ms[before] = max(self.tail_ms[before], delay + duration[key] + self.tail_ms[key])

    def runs(self, column: Column, microbatch: int | None) -> bool:
        """True where a microbatch has such an action; None: where all have."""
        some = self._some.get(column)
        return some is None or (microbatch in some if microbatch is not None else self._all(some))

    def _all(self, some: frozenset[int]) -> bool:
        return len(some) == self.problem.plan.microbatches

    def heads_of(self, microbatches: int) -> dict[Column, list[float]]:
        """``head_ms`` of every microbatch, those of a stage one after the other; 0 where one has no such action."""
        heads: dict[Column, list[float]] = {}
        for key, edges in self._edges.items():
            row, free = heads.setdefault(key, [0.0] * microbatches), 0.0
            for m in self._of(key, microbatches):
                before = [heads[k][m] + self._duration[k] + delay for k, delay in edges if self.runs(k, m)]
                row[m] = max([free, *before])
                free = row[m] + self._duration[key]
        return heads

    def tails_of(self, microbatches: int) -> dict[Column, list[float]]:
        """``tail_ms`` of every microbatch likewise."""
        tails: dict[Column, list[float]] = {key: [0.0] * microbatches for key in self._edges}
        for key, edges in reversed(self._edges.items()):
            row, duration = tails[key], self._duration[key]
            mine = self._of(key, microbatches)
            for m, following in reversed(list(pairwise(mine))):
                row[m] = max(row[m], duration + row[following])
            for before, delay in edges:
                for m in mine:
                    if self.runs(before, m):
                        tails[before][m] = max(tails[before][m], delay + duration + row[m])
        return tails

    def _of(self, column: Column, microbatches: int) -> list[int]:
        return [m for m in range(microbatches) if self.runs(column, m)]

    def count(self, column: Column, microbatches: int) -> int:
        """How many microbatches have such an action."""
        return len(self._of(column, microbatches))

    def _incoming(self, action: Action) -> list[tuple[Column, float]]:
        """What the action waits for, with the ms from there to arrival (0 on its own rank)."""
        stage = action.stage
        # of a microbatch that has all there can be
        m = next((row[0] for row in [self.problem.plan.extra_forwards(stage)] if row), 0)
        step = self.problem.step(action._replace(microbatch=m))
        delay: dict[Column, float] = {(s, k): 0.0 for s, k, _ in step.needs}
        for message in step.receives:
            key = (message.source_stage, GIVEN_BY[message.direction])
            sent = message._replace(microbatch=self._number_of(*key))
            delay[key] = max(delay[key], self.delays[sent])
        return list(delay.items())

    def _number_of(self, stage: int, kind: str) -> int:
        return self.problem.plan.extra_forwards(stage)[0] if kind == "E" else 0


Column = tuple[int, str]
"""(stage, what the op gives): one of these for every microbatch, or for some."""


def _column(action: Action) -> Column:
    return key_of(action)[:2]


def _message_delays(problem: Problem, actions: list[Action]) -> dict[Message, float]:
    """ms from the producer's end to arrival; messages of one action through one port follow one another."""
    delays: dict[Message, float] = {}
    for action in actions:
        queued: dict[Port, float] = defaultdict(float)
        for message in problem.step(action).sends:
            way = problem.way(message)
            queued[way.port] += way.transfer_ms
            delays[message] = queued[way.port] + way.latency_ms
    return delays


def lower_bound_ms(problem: Problem, microbatches: int, *, split: bool = False) -> float:
    """Largest of the rank and port bounds, in ms. ``split``: backward may run as ``I`` and ``W``."""
    known = problem.bounds_ms.get((microbatches, split))
    if known is None:
        paths = CriticalPaths(problem, split=split)
        known = max([*_port_bounds(paths, microbatches), *_rank_bounds(paths, microbatches)])
        problem.bounds_ms[microbatches, split] = known
    return known


def _rank_bounds(paths: CriticalPaths, microbatches: int) -> list[float]:
    """Per rank: the longest actions' tails first, interrupted whenever an action with a longer tail arrives."""
    problem = paths.problem
    heads, tails = paths.heads_of(microbatches), paths.tails_of(microbatches)
    jobs: list[list[tuple[float, float, float]]] = [[] for _ in range(problem.num_ranks)]
    for action in paths.actions:
        key, duration = _column(action), problem.least_ms(action)
        row = jobs[problem.placement[action.stage]]
        both = enumerate(zip(heads[key], tails[key], strict=True))
        row += [(head, tail, duration) for m, (head, tail) in both if paths.runs(key, m)]
    return [preemptive_ms(row) for row in jobs]


def preemptive_ms(jobs: list[tuple[float, float, float]]) -> float:
    """Makespan of (head, tail, duration) on one machine, the longest tail first, with interruptions."""
    waiting = sorted(jobs)
    ready: list[tuple[float, int, float]] = []
    now, makespan, at, number = 0.0, 0.0, 0, count()
    while at < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= now:
            _, tail, duration = waiting[at]
            heapq.heappush(ready, (-tail, next(number), duration))
            at += 1
        tail, order, left = heapq.heappop(ready)
        until = waiting[at][0] if at < len(waiting) else now + left
        if now + left <= until:
            now += left
            makespan = max(makespan, now - tail)
        else:
            heapq.heappush(ready, (tail, order, left - (until - now)))
            now = until
    return makespan


def _port_bounds(paths: CriticalPaths, microbatches: int) -> list[float]:
    problem = paths.problem
    work: dict[Port, float] = defaultdict(float)
    first: dict[Port, float] = {}
    last: dict[Port, float] = {}
    for action in paths.actions:
        key = _column(action)
        end = paths.head_ms[key] + problem.least_ms(action)
        for message in problem.step(action).sends:
            way = problem.way(message)
            reader = problem.reader_of(message, action.op)
            after = way.latency_ms + problem.least_ms(reader) + paths.tail_ms[_column(reader)]
            work[way.port] += paths.count(key, microbatches) * way.transfer_ms
            first[way.port] = min(first.get(way.port, end), end)
            last[way.port] = min(last.get(way.port, after), after)
    return [first[port] + work[port] + last[port] for port in work]
