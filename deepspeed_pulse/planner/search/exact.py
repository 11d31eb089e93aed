"""Exact order of actions by mixed-integer programming, for small instances.

Continuous starts t[a]; one binary y[a,b] per unordered pair of actions of a rank (1: a before b). Microbatches of a
stage run in order, which removes most pairs and makes the rest quick to solve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

from deepspeed_pulse.ir.schedule import Action, Op, Schedule
from deepspeed_pulse.planner.bounds import CriticalPaths
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.mip import Mip

Pair = tuple[Action, Action]
Row = tuple[list[tuple[object, float]], float]
"""Sum of (variable, coefficient) >= right side. A variable is an action, a pair, or MAKESPAN."""

MAKESPAN = "makespan"


@dataclass(frozen=True, kw_only=True)
class Solved:
    """An order per rank, and a makespan (ms) that no order beats as far as the solver could prove."""

    schedule: Schedule
    bound_ms: float


class OrderModel:
    """Rows of the model; solver-free, so that they can be read and tested.

    Args:
        upper_ms: makespan of a known order; only orders that are no slower are looked for.
    """

    def __init__(self, instance: Instance, microbatches: int, upper_ms: float) -> None:
        self.instance, self.microbatches, self.upper_ms = instance, microbatches, upper_ms
        self.actions = [
            Action(stage, op, m)
            for op in (Op.FORWARD, Op.BACKWARD)
            for stage in range(instance.num_stages)
            for m in range(microbatches)
        ]
        self._delay = _delays(CriticalPaths(instance))
        self.edges = list(self._edges())
        self._window()
        self.pairs = [pair for pair in self._unordered() if not self._decided(*pair)]

    def _edges(self) -> Iterator[tuple[Action, Action, float]]:
        """(a, b, ms from the end of a to the earliest start of b)."""
        stages = self.instance.num_stages
        for a in self.actions:
            s, m, forward = a.stage, a.microbatch, a.op is Op.FORWARD
            if m + 1 < self.microbatches:
                yield a, Action(s, a.op, m + 1), 0.0
            if forward:
                yield a, Action(s, Op.BACKWARD, m), 0.0
            following = s + 1 if forward else s - 1
            if 0 <= following < stages:
                yield a, Action(following, a.op, m), 0.0
        for (a, b), delay in self._delay.items():
            for m in range(self.microbatches):
                yield Action(a.stage, a.op, m), Action(b.stage, b.op, m), delay

    def _window(self) -> None:
        """Earliest starts and longest tails over precedence alone; and what comes after what."""
        duration = self.instance.duration_ms
        order = sorted(self.actions, key=self.topological)
        after: dict[Action, list[tuple[Action, float]]] = {a: [] for a in order}
        for a, b, delay in self.edges:
            after[a].append((b, delay))
        self.earliest = dict.fromkeys(order, 0.0)
        self.tail = dict.fromkeys(order, 0.0)
        self.later: dict[Action, set[Action]] = {a: set() for a in order}
        for a in order:
            for b, delay in after[a]:
                self.earliest[b] = max(self.earliest[b], self.earliest[a] + duration(a) + delay)
        for a in reversed(order):
            for b, delay in after[a]:
                self.tail[a] = max(self.tail[a], delay + duration(b) + self.tail[b])
                self.later[a] |= {b} | self.later[b]

    def topological(self, a: Action) -> tuple[int, int, int]:
        """Sorts actions so that what they wait for comes before them."""
        forward = a.op is Op.FORWARD
        return (0 if forward else 1, a.stage if forward else -a.stage, a.microbatch)

    def latest(self, a: Action) -> float:
        """Latest start that still meets ``upper_ms``."""
        return self.upper_ms - self.tail[a] - self.instance.duration_ms(a)

    def _unordered(self) -> Iterator[Pair]:
        """Pairs of a rank that precedence leaves open."""
        for a, b in combinations(self.actions, 2):
            same = self.instance.placement[a.stage] == self.instance.placement[b.stage]
            if same and b not in self.later[a] and a not in self.later[b]:
                yield a, b

    def _decided(self, a: Action, b: Action) -> bool:
        """Whether the time windows leave one order only; its row is then an edge."""
        a_first, b_first = self._possible(a, b), self._possible(b, a)
        if a_first and not b_first:
            self.edges.append((a, b, 0.0))
        if b_first and not a_first:
            self.edges.append((b, a, 0.0))
        return a_first != b_first

    def _possible(self, a: Action, b: Action) -> bool:
        return self.earliest[a] + self.instance.duration_ms(a) <= self.latest(b) + 1e-9

    def precedence(self) -> Iterator[Row]:
        """t[b] >= t[a] + d[a] + message: chain of stages, routes, and microbatches of a stage in order."""
        for a, b, delay in self.edges:
            yield [(b, 1.0), (a, -1.0)], self.instance.duration_ms(a) + delay

    def exclusive(self) -> Iterator[Row]:
        """One action at a time on a rank.

        t[b] >= t[a] + d[a] - K (1 - y[a,b])   and   t[a] >= t[b] + d[b] - K' y[a,b],

        with the smallest K that the time windows allow.
        """
        for a, b in self.pairs:
            da, db = self.instance.duration_ms(a), self.instance.duration_ms(b)
            slack_ab = self.latest(a) + da - self.earliest[b]
            slack_ba = self.latest(b) + db - self.earliest[a]
            yield [(b, 1.0), (a, -1.0), ((a, b), -slack_ab)], da - slack_ab
            yield [(a, 1.0), (b, -1.0), ((a, b), slack_ba)], db

    def finish(self) -> Iterator[Row]:
        """makespan >= t[a] + d[a] + tail[a]."""
        for a in self.actions:
            yield [(MAKESPAN, 1.0), (a, -1.0)], self.instance.duration_ms(a) + self.tail[a]


def _delays(paths: CriticalPaths) -> dict[Pair, float]:
    """Per pair of actions of one microbatch: ms from the producer's end to arrival, of its last message."""
    delays: dict[Pair, float] = {}
    for message, delay in paths.delays.items():
        op = Op.FORWARD if message.direction.value == "forward" else Op.BACKWARD
        pair = (Action(message.source_stage, op, 0), Action(message.target_stage, op, 0))
        delays[pair] = max(delays.get(pair, 0.0), delay)
    return delays


def count_pairs(instance: Instance, microbatches: int) -> int:
    """Binaries of the model before time windows remove some."""
    per_rank = (len(instance.plan.stages_of(rank)) for rank in range(instance.num_ranks))
    open_pairs = 0
    for held in per_rank:
        actions = 2 * held * microbatches
        open_pairs += math.comb(actions, 2) - 2 * held * math.comb(microbatches, 2)
    return open_pairs


def solve_order(
    instance: Instance, microbatches: int, incumbent: dict[Action, float], upper_ms: float, *, seconds: float, seed: int
) -> Solved | None:
    """Best order that HiGHS finds within ``seconds``; None when it finds none. ``incumbent``: known starts, ms."""
    model = OrderModel(instance, microbatches, upper_ms)
    program, column = _program(
        model,
        (model.precedence, model.exclusive, model.finish),
        incumbent,
        random_seed=seed,
        time_limit=float(seconds),
        mip_rel_gap=1e-9,
        mip_abs_gap=1e-9 * max(1.0, upper_ms),
    )
    return _read(program, model, column)


def _program(
    model: Any, families: Sequence[Callable[[], Iterator[Row]]], starts: Mapping[Any, float], **options: float
) -> tuple[Mip, dict[object, int]]:
    """A program from known starts (ms): columns are starts, pairs and the makespan, rows the families'.

    Returns it with the column of every variable.
    """
    program = Mip(**options)
    column: dict[object, int] = {}
    for node in model.actions:
        low = model.earliest[node]
        column[node] = program.column(low, max(low, model.latest(node)))
    for pair in model.pairs:
        column[pair] = program.column(0.0, 1.0, integer=True)
    column[MAKESPAN] = program.column(0.0, model.upper_ms, cost=1.0)
    for family in families:
        for terms, right in family():
            program.row([(column[variable], factor) for variable, factor in terms], right)
    pairs = (float(starts[a] < starts[b]) for a, b in model.pairs)
    program.start_from([*(starts[node] for node in model.actions), *pairs, model.upper_ms])
    return program, column


def _read(program: Mip, model: OrderModel, column: dict[object, int]) -> Solved | None:
    values = program.solve()
    if values is None:
        return None
    info = program.solver.getInfo()
    ranks = model.instance.num_ranks
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for a in sorted(model.actions, key=lambda a: (values[column[a]], model.topological(a))):
        rows[model.instance.placement[a.stage]].append(a)
    bound = info.mip_dual_bound if model.pairs else info.objective_function_value
    return Solved(schedule=tuple(map(tuple, rows)), bound_ms=float(bound) if math.isfinite(bound) else 0.0)


class Model(Protocol):
    """Rows over starts of nodes, pairs of them and MAKESPAN, as a window of an order has them."""

    actions: list[int]
    pairs: list[tuple[int, int]]
    earliest: dict[int, float]
    upper_ms: float

    def latest(self, node: int, /) -> float: ...
    def precedence(self) -> Iterator[Row]: ...
    def exclusive(self) -> Iterator[Row]: ...
    def stash(self) -> Iterator[Row]: ...
    def finish(self) -> Iterator[Row]: ...


def solve_model(model: Model, starts: dict[int, float], *, seconds: float, max_nodes: int) -> dict[int, float] | None:
    """Starts of the best order that HiGHS finds; None when it finds none. ``starts``: of the order known."""
    families = (model.precedence, model.exclusive, model.stash, model.finish)
    program, column = _program(
        model, families, starts, random_seed=0, time_limit=float(seconds), mip_max_nodes=max_nodes
    )
    values = program.solve()
    if values is None:
        return None
    return {node: values[column[node]] for node in model.actions}
