"""The order of some of a net's nodes as a mixed-integer program: all of them, or a window of a known order.

Continuous starts t[a]; one binary y[a,b] per pair of actions of a rank whose order is open (1: a before b).
Microbatches of a stage run in order, and time windows decide many pairs, which makes the rest quick to solve. Where
the model of all actions is small it is solved as it is: :func:`solve_order`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from deepspeed_pulse.ir.schedule import Action, Schedule
from deepspeed_pulse.planner.mip import Mip
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.search.net import Net

Row = tuple[list[tuple[object, float]], float]
"""Sum of (variable, coefficient) >= right side. A variable is a node, a pair of nodes, or MAKESPAN."""

MAKESPAN = "makespan"


class OrderModel:
    """Rows of the model; solver-free, so that they can be read and tested.

    Args:
        nodes: actions in an order in which they can run.
        floor: ms before which a node cannot start, whatever the order of the others.
        rest: ms that pass after a node's end, likewise.
        upper_ms: makespan of a known order; only orders that are no slower are looked for.
    """

    def __init__(
        self, net: Net, nodes: Sequence[int], floor: Mapping[int, float], rest: Mapping[int, float], upper_ms: float
    ) -> None:
        self.net, self.nodes, self.upper_ms = net, list(nodes), upper_ms
        self.earliest, self.tail = dict(floor), dict(rest)
        self.edges = list(self._edges())
        self._spread()
        self.pairs = [pair for pair in self._unordered() if not self._decided(*pair)]

    def _edges(self) -> Iterator[tuple[int, int, float]]:
        """(a, b, ms from the end of a to the earliest start of b): what b waits for, and its column's order."""
        inside = set(self.nodes)
        columns: dict[int, list[int]] = {}
        for node in self.nodes:
            columns.setdefault(self.net.column[node], []).append(node)
            yield from ((node, other, gap) for other, gap in self.net.after[node] if other in inside)
        for column in columns.values():
            yield from ((a, b, 0.0) for a, b in pairwise(column))

    def _spread(self) -> None:
        """Floors and rests along the edges; and what comes after what."""
        duration = self.net.duration
        after: dict[int, list[tuple[int, float]]] = {node: [] for node in self.nodes}
        for a, b, gap in self.edges:
            after[a].append((b, gap))
        self.later: dict[int, set[int]] = {node: set() for node in self.nodes}
        for a in self.nodes:
            for b, gap in after[a]:
                self.earliest[b] = max(self.earliest[b], self.earliest[a] + duration[a] + gap)
        for a in reversed(self.nodes):
            for b, gap in after[a]:
                self.tail[a] = max(self.tail[a], gap + duration[b] + self.tail[b])
                self.later[a] |= {b} | self.later[b]

    def latest(self, node: int) -> float:
        """Latest start that still meets ``upper_ms``."""
        return self.upper_ms - self.tail[node] - self.net.duration[node]

    def _unordered(self) -> Iterator[tuple[int, int]]:
        """Pairs of a rank that precedence leaves open."""
        machine = self.net.machine
        for a, b in combinations(self.nodes, 2):
            if machine[a] == machine[b] and b not in self.later[a] and a not in self.later[b]:
                yield a, b

    def _decided(self, a: int, b: int) -> bool:
        """Whether the time windows leave one order only; its row is then an edge."""
        a_first, b_first = self._possible(a, b), self._possible(b, a)
        if a_first and not b_first:
            self.edges.append((a, b, 0.0))
        if b_first and not a_first:
            self.edges.append((b, a, 0.0))
        return a_first != b_first

    def _possible(self, a: int, b: int) -> bool:
        return self.earliest[a] + self.net.duration[a] <= self.latest(b) + 1e-9

    def rows(self) -> Iterator[Row]:
        """Of any order no slower than the one known.

        * t[b] >= t[a] + d[a] + message, where b waits for a, or comes after it in its column;
        * one action at a time on a rank: t[b] >= t[a] + d[a] - K (1 - y[a,b]) and t[a] >= t[b] + d[b] - K' y[a,b],
          with the smallest K that the time windows allow;
        * makespan >= t[a] + d[a] + what follows.
        """
        duration = self.net.duration
        for a, b, gap in self.edges:
            yield [(b, 1.0), (a, -1.0)], duration[a] + gap
        for a, b in self.pairs:
            slack_ab = self.latest(a) + duration[a] - self.earliest[b]
            slack_ba = self.latest(b) + duration[b] - self.earliest[a]
            yield [(b, 1.0), (a, -1.0), ((a, b), -slack_ab)], duration[a] - slack_ab
            yield [(a, 1.0), (b, -1.0), ((a, b), slack_ba)], duration[b]
        for a in self.nodes:
            yield [(MAKESPAN, 1.0), (a, -1.0)], duration[a] + self.tail[a]

    def program(
        self, starts: Mapping[int, float], more: Iterable[Row] = (), *, seconds: float, **options: float
    ) -> Mip:
        """From known starts (ms): columns are the nodes' starts in order, then pairs and the makespan.

        ``more``: further rows; ``seconds``, ``options``: as of :class:`Mip`.
        """
        program = Mip(seconds=seconds, **options)
        column: dict[object, int] = {}
        for node in self.nodes:
            low = self.earliest[node]
            column[node] = program.column(low, max(low, self.latest(node)))
        for pair in self.pairs:
            column[pair] = program.column(0.0, 1.0, integer=True)
        column[MAKESPAN] = program.column(0.0, self.upper_ms, cost=1.0)
        for terms, right in (*self.rows(), *more):
            program.row([(column[variable], factor) for variable, factor in terms], right)
        pairs = (float(starts[a] < starts[b]) for a, b in self.pairs)
        program.start_from([*(starts[node] for node in self.nodes), *pairs, self.upper_ms])
        return program


@dataclass(frozen=True, kw_only=True)
class Solved:
    """An order per rank, and a makespan (ms) that no order beats as far as the solver could prove."""

    schedule: Schedule
    bound_ms: float


def count_pairs(problem: Problem, microbatches: int) -> int:
    """Binaries of the model before time windows remove some."""
    found = 0
    for rank in range(problem.num_ranks):
        stages = problem.plan.stages_of(rank)
        columns = [microbatches] * 2 * len(stages) + [len(problem.plan.extra_forwards(stage)) for stage in stages]
        found += math.comb(sum(columns), 2) - sum(math.comb(n, 2) for n in columns)
    return found


def whole_model(problem: Problem, upper_ms: float) -> OrderModel:
    """The model of all actions; messages follow one another only within an action."""
    net = Net(problem, problem.plan.microbatches, queues=False)
    nodes, nothing = net.in_any_order(), dict.fromkeys(range(net.num_actions), 0.0)
    return OrderModel(net, nodes, nothing, nothing, upper_ms)


def solve_order(
    problem: Problem, incumbent: Mapping[Action, float], upper_ms: float, *, seconds: float, seed: int
) -> Solved | None:
    """Best order that HiGHS finds within ``seconds``; None when it finds none. ``incumbent``: known starts, ms."""
    model = whole_model(problem, upper_ms)
    net = model.net
    program = model.program(
        {node: incumbent[action] for action, node in net.index.items()},
        random_seed=seed,
        seconds=seconds,
        mip_rel_gap=1e-9,
        mip_abs_gap=1e-9 * upper_ms,
    )
    values = program.solve()
    if values is None:
        return None
    value = dict(zip(model.nodes, values, strict=False))
    place = {node: at for at, node in enumerate(model.nodes)}
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for node in sorted(model.nodes, key=lambda node: (value[node], place[node])):
        rows[net.machine[node]].append(node)
    info = program.solver.getInfo()
    bound = info.mip_dual_bound if model.pairs else info.objective_function_value
    return Solved(schedule=net.schedule(rows), bound_ms=float(bound) if math.isfinite(bound) else 0.0)
