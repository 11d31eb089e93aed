"""Nested cuts, grown from the outside in: the wave placement with W = 1 (PULSE, arXiv 2606.19163, section on
partitioning, with the sum of a rank's two stages in place of the largest stage).

State (i, j): the k outermost ranks hold layers [0, i) and [j, n). Rank k-1 grows it from (i', j') by the stages
[i', i) and [j, j'). The last rank ends at i = j. Arrays over (i', j') have i' as rows and j' as columns.

Keeping both ends of every skip on one rank is a property of states alone: no skip may have exactly one end inside
[i, j). Such cuts are called clean; with many skips there are few.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepspeed_pulse.ir.profile import Value
from deepspeed_pulse.planner.cost import Floats
from deepspeed_pulse.planner.partition.cut_costs import CutCosts
from deepspeed_pulse.planner.partition.space import CutSpace, Stage

State = tuple[int, int]


class NestedCuts(CutSpace[State]):
    """Ways to cut for a V; only clean ones if ``weights.clean``."""

    dimensions = 2

    def __init__(self, weights: CutCosts, in_flight: tuple[int, ...], *, most_ms: float = float("inf")) -> None:
        partable = [value for value in weights.values if not weights.clean or value not in weights.paired]
        self._several = [value for value in partable if len(value.targets) > 1]
        self._lone = [value for value in partable if len(value.targets) == 1]
        self._both, self._targets = _skip_sums(weights.num_layers, self._lone)
        self._clean = _crossing(weights) == 0
        self.origin = (0, weights.num_layers)
        super().__init__(weights, in_flight, len(weights.placement) // 2, most_ms)

    def _states_after(self, k: int) -> list[State]:
        """Cuts that leave two layers for each rank still to come, and no more work than they may have."""
        n, left, work = self.num_layers, self.num_ranks - k, self.weights.work_ms
        if k == self.num_ranks:
            return [(i, i) for i in range(k, n - k + 1)]
        i, j = np.indices((n + 1, n + 1))
        inside = work[None, :] - work[:, None]
        fits = (i >= k) & (j <= n - k) & (j - i >= 2 * left) & self._clean
        with np.errstate(invalid="ignore"):
            fits &= inside <= self.most_inside_ms(k, self.weights.fill * work[:, None])
            fits &= work[-1] - inside <= self.most_outside_ms(k)
        if k == 0:
            fits = (i == 0) & (j == n)
        return [(int(a), int(b)) for a, b in zip(*np.nonzero(fits), strict=True)]

    def _window(self, state: State) -> tuple[slice, slice]:
        i, j = state
        return slice(min(int(self._first[i]), i), i), slice(j + 1, int(self._last[j]) + 1)

    def _before(self, state: State, flat: int) -> State:
        rows, columns = self._window(state)
        i, j = divmod(flat, columns.stop - columns.start)
        return rows.start + i, columns.start + j

    def stages(self, k: int, before: State, state: State) -> tuple[Stage, ...]:
        return (k - 1, (before[0], state[0])), (2 * self.num_ranks - k, (state[1], before[1]))

    def _pair(self, prefix: Floats, state: State) -> tuple[Floats, Floats]:
        """Sums over the two stages."""
        (i, j), (rows, columns) = state, self._window(state)
        return (prefix[i] - prefix[rows])[:, None], (prefix[columns] - prefix[j])[None, :]

    def _busy_ms(self, state: State) -> Floats:
        work, fill, (_, j), (rows, _) = self.weights.work_ms, self.weights.fill, state, self._window(state)
        down, up = self._pair(work, state)
        load = down + up
        return np.maximum(load + fill * work[rows, None], up + fill * work[j]) if fill else load

    def _hidden(self, state: State) -> Floats:
        """Bytes of each directed link to the rank outside: a hidden state and the other cut's gradient."""
        rows, columns = self._window(state)
        return np.asarray(self.weights.cut_bytes[rows, None] + self.weights.cut_bytes[None, columns])

    def stage_ms(self, k: int, state: State) -> Floats:
        down, up = self._pair(self.weights.work_ms, state)
        return np.maximum(down, up)

    def memory(self, k: int, state: State) -> Floats:
        depth, (first, second) = self.in_flight, self._pair(self.weights.activations, state)
        kept = first * depth[k - 1] + second * depth[len(depth) - k]
        params, frozen = self._pair(self.weights.param_bytes, state), self._pair(self.weights.frozen_bytes, state)
        return self.weights.held(params[0] + params[1], frozen[0] + frozen[1], kept)

    def _parted_bytes(self, state: State) -> Floats:
        """Of values with one consumer that is on the rank while the producer is not."""
        (i, j), (rows, columns) = state, self._window(state)
        both, targets, own = self._both, self._targets, np.diagonal(self._both)
        arriving = (targets[i] - targets[rows])[:, None] + (targets[columns] - targets[j])[None, :]
        inner = both[i, i] - both[rows, i] - both[i, rows] + own[rows]
        outer = own[columns] - both[j, columns] - both[columns, j] + both[j, j]
        across = both[i, columns][None, :] - both[rows, columns] - both[i, j] + both[rows, j][:, None]
        return np.asarray(arriving - inner[:, None] - outer[None, :] - across)

    def crossing_bytes(self, k: int, state: State) -> Floats:
        (i, j), (rows, columns) = state, self._window(state)
        hidden = 2.0 * self._hidden(state)
        total = hidden if k > 1 else np.zeros_like(hidden)
        if self._lone:
            total = total + self._parted_bytes(state)
        if not self._several:
            return total
        first, last = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)[None, :]

        def inside(layer: int) -> npt.NDArray[np.bool_]:
            return ((first <= layer) & (layer < i)) | ((j <= layer) & (layer < last))

        for value in self._several:
            reads = np.logical_or.reduce([inside(target) for target in value.targets])
            total = total + value.both_ways * (reads & ~inside(value.source))
        return total


def _crossing(weights: CutCosts) -> npt.NDArray[np.int64]:
    """Per (i, j): number of values with exactly one end in [i, j) that no cuts may part."""
    count = np.zeros((weights.num_layers + 1,) * 2, dtype=np.int64)
    i, j = np.indices(count.shape)
    for value in weights.paired if weights.clean else ():
        source, target = value.source, value.targets[0]
        count += ((i <= source) & (source < j)) ^ ((i <= target) & (target < j))
    return count


def _skip_sums(num_layers: int, values: Sequence[Value]) -> tuple[Floats, Floats]:
    """Bytes of values with one consumer with source < a and target < b, as [a, b]; and with target < b, as [b]."""
    n = num_layers
    both, targets = np.zeros((n + 1, n + 1)), np.zeros(n + 1)
    for value in values:
        both[value.source + 1, value.targets[0] + 1] += value.both_ways
        targets[value.targets[0] + 1] += value.both_ways
    return both.cumsum(axis=0).cumsum(axis=1), targets.cumsum()
