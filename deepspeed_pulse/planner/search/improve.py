"""From the generators' orders to better ones: tabu searches from several starts, the best of them for longer, HiGHS
on windows of what they end with.

Deterministic as long as the deadline is not reached: everything else is bounded by steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepspeed_pulse.ir.schedule import Op, Schedule
from deepspeed_pulse.planner.buckets import behind_ms
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.reduction import reduction_ms
from deepspeed_pulse.planner.schedules.listing import Cap
from deepspeed_pulse.planner.search.net import Net
from deepspeed_pulse.planner.search.paths import Paths
from deepspeed_pulse.planner.search.tabu import Search
from deepspeed_pulse.planner.search.windows import reordered, windows

_STARTS = 16
_NODES_A_ROUND = 400_000
"""Work of one round of one search, in evaluated nodes, and no more steps than nodes: some tenths of a second."""

_PATIENCE = 12
"""Rounds without a better order after which the last search ends."""

_LEAST_ROUNDS, _STANDS = 32, 4
"""Short searches end when the best order has stood for so many times what it took to find, but not before so many
rounds in all: two of each start."""

_REJECTED = 35
"""Orders in a row that do not fit the memory after which a search ends: half of the stash is left, and what is too
much may be received values, which the stash does not count."""

_LARGE = 5_000
"""Nodes above which only the best start is searched from."""

_TIGHTER = 0.98
"""Share of the stash left when an order did not fit the memory: what arrives early is not counted beforehand."""


@dataclass(kw_only=True)
class Improver:
    """Searches orders of one problem. ``keep``: told a round's best order; says whether it counts (its memory fits)."""

    problem: Problem
    split: bool
    cap: Cap | None
    target_ms: float
    seed: int
    deadline: float
    keep: Callable[[Schedule], bool]
    net: Net = field(init=False)
    best_ms: float = field(init=False, default=math.inf)
    _rounds: int = field(init=False, default=0)
    _found: int = field(init=False, default=0)
    """Round of the best order of all searches; ``_found_ms``: its longest path."""
    _found_ms: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        problem = self.problem
        last_ms = {Op.BACKWARD: problem.costs.backward_ms, Op.WEIGHT_GRAD: problem.costs.weight_grad_ms}
        finish = {
            op: [
                behind_ms(problem.buckets[stage], ms) if problem.rules.reduce_early else reduction_ms(problem, stage)
                for stage, ms in enumerate(of_stages)
            ]
            for op, of_stages in last_ms.items()
        }
        self.net = Net(problem, problem.plan.microbatches, split=self.split, finish_ms=finish)

    def improve(self, starts: Sequence[Schedule]) -> None:
        """Short searches from every start, longer ones from the better half, and so on to the best one.

        Or to the one that is the best when none has found a better order for long.
        """
        count = _STARTS if len(self.net.duration) <= _LARGE else 1
        searches = [
            Search(self.net, self.cap, self.net.rows(start), seed=self.seed * 1000 + n, target_ms=self.target_ms)
            for n, start in enumerate(starts[:count])
        ]
        self._found_ms = min((search.best_ms for search in searches), default=math.inf)
        patience = 1
        while len(searches) > 1 and not self._over and not self._stands:
            for search in searches:
                self._exhaust(search, patience)
            searches.sort(key=lambda search: search.best_ms)
            searches = searches[: (len(searches) + 1) // 2]
            patience *= 2
        for search in searches[:1]:
            self._exhaust(search, _PATIENCE)
            self._reorder_windows(search)

    def shortest(self, orders: Sequence[Schedule]) -> Schedule | None:
        """The order with the shortest longest path of those that do not deadlock."""
        spans: dict[Schedule, float] = {}
        for order in orders:
            rows = self.net.rows(order)
            if time.process_time() < self.deadline and self.net.chained(rows) is not None:
                spans[order] = Paths(self.net, rows).span
        return min(spans, key=lambda order: spans[order], default=None)

    def _exhaust(self, search: Search, patience: int) -> None:
        size = len(self.net.duration)
        steps = max(20, min(_NODES_A_ROUND // size, size))
        idle = rejected = 0
        while idle < patience and rejected < _REJECTED and not self._over:
            before = (search.best_rows, search.best_ms)
            better = search.run(steps, self.deadline)
            self._rounds += 1
            if better and self.keep(self.net.schedule(search.best_rows)):
                self.best_ms = min(self.best_ms, search.best_ms)
                if search.best_ms < self._found_ms:
                    self._found, self._found_ms = self._rounds, search.best_ms
                rejected = 0
            elif better:
                search.reject(*before, _TIGHTER)
                rejected += 1
            idle = 0 if better else idle + 1

    def _reorder_windows(self, search: Search) -> None:
        """HiGHS on one window after the other; what it improves is searched again."""
        improved = not self.net.queues and len(self.net.duration) <= _LARGE
        while improved and not self._over:
            count = len(windows(Paths(self.net, search.best_rows)))
            improved = sum(self._reorder(search, number) for number in range(count)) > 0
            if improved:
                self._exhaust(search, _PATIENCE)

    def _reorder(self, search: Search, number: int) -> bool:
        spans = windows(Paths(self.net, search.best_rows))
        left = self.deadline - time.process_time()
        if number >= len(spans) or self._over:
            return False
        rows = reordered(self.net, search.best_rows, spans[number], search.change, search.limits, seconds=left)
        if rows is None or not self.keep(self.net.schedule(rows)):
            return False
        search.adopt(rows)
        self.best_ms = min(self.best_ms, search.best_ms)
        return True

    @property
    def _stands(self) -> bool:
        """The best order of all has been so for long."""
        return self._rounds > max(_LEAST_ROUNDS, _STANDS * self._found)

    @property
    def _over(self) -> bool:
        return self.best_ms <= self.target_ms * (1 + 1e-9) or time.process_time() >= self.deadline
