"""From the generators' orders to better ones: tabu searches from several starts, the best of them for longer.

Deterministic as long as the deadline is not reached: everything else is bounded by steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepspeed_pulse.ir.schedule import Action, Op, Schedule
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.listing import Cap
from deepspeed_pulse.planner.net import Net, Rows
from deepspeed_pulse.planner.search import Search
from deepspeed_pulse.planner.simulate import reduction_ms

_STARTS = 6
_NODES_A_ROUND = 400_000
"""Work of one round of one search, in evaluated nodes: a tenth of a second or two."""
_PATIENCE = 24
"""Rounds without a better order after which a search ends."""

_REJECTED = 30
"""Orders that did not fit the memory after which a search is given less: what arrives early was not counted."""


@dataclass(kw_only=True)
class Improver:
    """Searches orders of one instance.

    Args:
        keep: told every order that is better in the search's eyes; says whether it counts (its memory fits).
    """

    instance: Instance
    split: bool
    cap: Cap | None
    target_ms: float
    seed: int
    deadline: float
    keep: Callable[[Schedule], bool]
    net: Net = field(init=False)

    def __post_init__(self) -> None:
        instance = self.instance
        finish = tuple(reduction_ms(instance, stage) for stage in range(instance.num_stages))
        self.net = Net(instance, instance.plan.microbatches, split=self.split, finish_ms=finish)

    def improve(self, starts: Sequence[Schedule]) -> None:
        """Short searches from every start, then long ones from the best half, then one from the best."""
        searches = [self._search(number, start) for number, start in enumerate(starts[:_STARTS])]
        patience = 2
        while searches and not self._over(searches):
            for search in searches:
                self._exhaust(search, patience)
            searches.sort(key=lambda search: search.best_ms)
            if len(searches) == 1:
                break
            searches = searches[: (len(searches) + 1) // 2]
            patience = _PATIENCE if len(searches) == 1 else 2 * patience

    def _search(self, number: int, start: Schedule) -> Search:
        rows = self.net.rows(start)
        return Search(
            self.net, self.cap, rows, seed=self.seed * 1000 + number, target_ms=self.target_ms, accept=self._accept
        )

    def _accept(self, rows: Rows) -> bool:
        return self.keep(self.net.schedule(rows))

    def _exhaust(self, search: Search, patience: int) -> None:
        idle = 0
        while idle < patience and not self._over([search]):
            size = len(self.net.duration)
            steps = max(20, min(_NODES_A_ROUND // size, 25 * size))
            idle = 0 if search.run(steps, self.deadline) else idle + 1
            if search.rejected > _REJECTED:
                search.tighten(0.97)

    def _over(self, searches: Sequence[Search]) -> bool:
        reached = min(search.best_ms for search in searches) <= self.target_ms * (1 + 1e-9)
        return reached or time.monotonic() >= self.deadline


def split_backwards(schedule: Schedule) -> Schedule:
    """Every ``B`` as ``I`` and ``W``, one right after the other."""
    return tuple(
        tuple(
            Action(action.stage, op, action.microbatch)
            for action in row
            for op in ((Op.INPUT_GRAD, Op.WEIGHT_GRAD) if action.op is Op.BACKWARD else (action.op,))
        )
        for row in schedule
    )
