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
from itertools import count

from deepspeed_pulse.ir.dependencies import Key, key_of
from deepspeed_pulse.ir.program import Message
from deepspeed_pulse.ir.schedule import Action, Op
from deepspeed_pulse.planner.links import Port
from deepspeed_pulse.planner.problem import Problem


class CriticalPaths:
    """Longest paths of one microbatch: ``head_ms`` before each action starts, ``tail_ms`` after it ends."""

    def __init__(self, problem: Problem, *, split: bool = False) -> None:
        self.problem = problem
        stages, back = range(problem.num_stages), Op.INPUT_GRAD if split else Op.BACKWARD
        self.actions = [Action(s, Op.FORWARD, 0) for s in stages] + [Action(s, back, 0) for s in reversed(stages)]
        self.actions += [Action(s, Op.WEIGHT_GRAD, 0) for s in stages if split]
        self.delays = _message_delays(problem, self.actions)
        self._edges = {key_of(a): self._incoming(a) for a in self.actions}
        self._duration = duration = {key_of(a): problem.least_ms(a) for a in self.actions}
        self.head_ms: dict[Key, float] = {}
        self.tail_ms: dict[Key, float] = dict.fromkeys(self._edges, 0.0)
        for key, edges in self._edges.items():
            self.head_ms[key] = max((self.head_ms[k] + duration[k] + delay for k, delay in edges), default=0.0)
        for key, edges in reversed(self._edges.items()):
            for before, delay in edges:
                self.tail_ms[before] = max(self.tail_ms[before], delay + duration[key] + self.tail_ms[key])

    def heads_of(self, microbatches: int) -> dict[Key, list[float]]:
        """``head_ms`` of every microbatch, those of a stage one after the other."""
        heads: dict[Key, list[float]] = {}
        for key, edges in self._edges.items():
            row, free = heads.setdefault(key, []), 0.0
            for m in range(microbatches):
                row.append(max([free] + [heads[k][m] + self._duration[k] + delay for k, delay in edges]))
                free = row[-1] + self._duration[key]
        return heads

    def tails_of(self, microbatches: int) -> dict[Key, list[float]]:
        """``tail_ms`` of every microbatch likewise."""
        tails: dict[Key, list[float]] = {key: [0.0] * microbatches for key in self._edges}
        for key, edges in reversed(self._edges.items()):
            row, duration = tails[key], self._duration[key]
            for m in reversed(range(microbatches - 1)):
                row[m] = max(row[m], duration + row[m + 1])
            for before, delay in edges:
                tails[before] = [max(a, delay + duration + b) for a, b in zip(tails[before], row, strict=True)]
        return tails

    def _incoming(self, action: Action) -> list[tuple[Key, float]]:
        """What the action waits for, with the ms from there to arrival (0 on its own rank)."""
        kind = key_of(action)[1]
        delay: dict[Key, float] = dict.fromkeys(self.problem.needs(action), 0.0)
        for message in self.problem.step(action).receives:
            key = (message.source_stage, kind, 0)
            delay[key] = max(delay[key], self.delays[message])
        return list(delay.items())


def _message_delays(problem: Problem, actions: list[Action]) -> dict[Message, float]:
    """ms from the producer's end to arrival; messages of one action through one port follow one another."""
    delays: dict[Message, float] = {}
    for action in actions:
        queued: dict[Port, float] = defaultdict(float)
        for message in problem.step(action).sends:
            port, (transfer_ms, latency_ms) = problem.port_of(message), problem.delay(message)
            queued[port] += transfer_ms
            delays[message] = queued[port] + latency_ms
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
        key, duration = key_of(action), problem.least_ms(action)
        row = jobs[problem.placement[action.stage]]
        row += [(head, tail, duration) for head, tail in zip(heads[key], tails[key], strict=True)]
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
        key = key_of(action)
        end = paths.head_ms[key] + problem.least_ms(action)
        for message in problem.step(action).sends:
            port, (transfer_ms, latency_ms) = problem.port_of(message), problem.delay(message)
            target = (message.target_stage, key[1], 0)
            consumer = problem.least_ms(Action(message.target_stage, action.op, 0))
            after = latency_ms + consumer + paths.tail_ms[target]
            work[port] += transfer_ms
            first[port] = min(first.get(port, end), end)
            last[port] = min(last.get(port, after), after)
    return [first[port] + microbatches * work[port] + last[port] for port in work]
