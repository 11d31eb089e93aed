"""Consecutive cuts: one stage a rank, skips sent directly.

State b: the first k ranks hold layers [0, b). Rank k-1 grows it from a by the stage [a, b).
"""

from __future__ import annotations

import numpy as np

from deepspeed_pulse.planner.cost import Floats
from deepspeed_pulse.planner.partition.cut_costs import CutCosts
from deepspeed_pulse.planner.partition.space import CutSpace, Stage


class ConsecutiveCuts(CutSpace[int]):
    """Ways to cut for linear placement."""

    origin, dimensions = 0, 1

    def __init__(self, weights: CutCosts, in_flight: tuple[int, ...], *, most_ms: float = float("inf")) -> None:
        super().__init__(weights, in_flight, len(weights.placement), most_ms)

    def _states_after(self, k: int) -> list[int]:
        n, left, work = self.num_layers, self.num_ranks - k, self.weights.work_ms
        if k in (0, self.num_ranks):
            return [0 if k == 0 else n]
        outside, inside = self.most_outside_ms(k), self.most_inside_ms(k, self.weights.fill * work)
        return [b for b in range(k, n - left + 1) if work[b] <= outside and work[-1] - work[b] <= inside[b]]

    def _window(self, state: int) -> slice:
        return slice(min(int(self._first[state]), state), state)

    def _before(self, state: int, flat: int) -> int:
        return int(self._window(state).start) + flat

    def stages(self, k: int, before: int, state: int) -> tuple[Stage, ...]:
        return ((k - 1, (before, state)),)

    def _work_ms(self, state: int) -> Floats:
        return np.asarray(self.weights.work_ms[state] - self.weights.work_ms[self._window(state)])

    def _busy_ms(self, state: int) -> Floats:
        return self._work_ms(state) + self.weights.fill * self.weights.work_ms[self._window(state)]

    def _hidden(self, state: int) -> Floats:
        return np.asarray(self.weights.cut_bytes[self._window(state)])

    def stage_ms(self, k: int, state: int) -> Floats:
        return self._work_ms(state)

    def memory(self, k: int, state: int) -> Floats:
        window, weights = self._window(state), self.weights
        sums = weights.param_bytes, weights.frozen_bytes, weights.activations
        params, frozen, kept = (each[state] - each[window] for each in sums)
        return weights.held(params, frozen, kept * self.in_flight[k - 1])

    def crossing_bytes(self, k: int, state: int) -> Floats:
        window = self._window(state)
        first = np.arange(window.start, window.stop)
        total = 2.0 * self._hidden(state) if k > 1 else np.zeros(len(first))
        for value in self.weights.values:
            reads = np.logical_or.reduce([(first <= t) & (t < state) for t in value.targets])
            held = (first <= value.source) & (value.source < state)
            total = total + value.both_ways * (reads & ~held)
        return total
