"""Outside-in dynamic program over nested cuts: the wave placement with W = 1 (PULSE, arXiv 2606.19163, section on
partitioning, with the sum of a rank's two stages in place of the largest stage).

State (k, i, j): the k outermost ranks hold layers [0, i) and [j, n). Rank k-1 grows it from (i', j') by the stages
[i', i) and [j, j'). The last rank ends at i = j.

Keeping both ends of every skip on one rank is a property of states alone: no skip may have exactly one end inside
[i, j). Such cuts are called clean; with many skips there are few.

The objective is lexicographic. Each key is solved to its optimum by one sweep and then fixed: a key that is a maximum
by a limit on every edge, a key that is a sum by keeping only the edges on which it is tight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from deepspeed_pulse.planner.weights import Floats, Weights

State = tuple[int, int]
Bools = npt.NDArray[np.bool_]
_EPS = 1e-9


class NestedCuts:
    """The search space of one profile: edges (i', j') -> (i, j) of rank k-1, for all (i', j') at once.

    Arrays over (i', j') have i' = 0..i-1 as rows and j' = j+1..n as columns.
    """

    def __init__(self, weights: Weights, num_pairs: int, in_flight: Sequence[int], *, clean: bool) -> None:
        self.weights, self.num_pairs, self.in_flight = weights, num_pairs, in_flight
        self.num_layers = n = weights.num_layers
        self._both, self._targets = _skip_sums(weights)
        crossing = self._crossing()
        self._only_clean = clean
        self._clean = crossing == 0 if clean else np.ones((n + 1, n + 1), dtype=bool)
        self._states = [self._all_states(k) for k in range(num_pairs + 1)]
        self.masks: dict[tuple[int, State], Bools] = {}
        """Edges that are left after the keys solved so far."""

    def _all_states(self, k: int) -> list[State]:
        """Cuts after k ranks that leave two layers for each rank still to come."""
        n, left = self.num_layers, 2 * (self.num_pairs - k)
        if k == self.num_pairs:
            return [(i, i) for i in range(k, n - k + 1)]
        return [(i, j) for i in range(k, n) for j in range(i + left, n - k + 1) if self._clean[i, j]]

    def _crossing(self) -> npt.NDArray[np.int64]:
        """Per (i, j): number of paired skips with exactly one end in [i, j)."""
        count = np.zeros((self.num_layers + 1,) * 2, dtype=np.int64)
        i, j = np.indices(count.shape)
        for value in self.weights.paired:
            source, target = value.source, value.targets[0]
            count += ((i <= source) & (source < j)) ^ ((i <= target) & (target < j))
        return count

    def work(self, state: State) -> tuple[Floats, Floats]:
        """Compute of the two stages, ms."""
        return self._pair(self.weights.work_ms, state)

    def _pair(self, prefix: Floats, state: State) -> tuple[Floats, Floats]:
        i, j = state
        return (prefix[i] - prefix[:i])[:, None], (prefix[j + 1 :] - prefix[j])[None, :]

    def rank_ms(self, k: int, state: State) -> Floats:
        """Largest of the rank's compute and its links to the rank outside it."""
        down, up = self.work(state)
        i, j = state
        load: Floats = down + up
        if k > 1:
            cut = self.weights.cut_bytes
            link = (cut[:i, None] + cut[None, j + 1 :]) * self.weights.ms_per_byte(k - 1)
            load = np.maximum(load, link)
        return load

    def stage_ms(self, k: int, state: State) -> Floats:
        down, up = self.work(state)
        return np.maximum(down, up)

    def memory(self, k: int, state: State) -> Floats:
        """State and activations in flight of the rank, bytes."""
        first, second = self._pair(self.weights.activations, state)
        down, up = self._pair(self.weights.state, state)
        depth = self.in_flight
        return down + up + first * depth[k - 1] + second * depth[len(depth) - k]

    def parted_bytes(self, k: int, state: State) -> Floats:
        """Of paired skips whose consumer is on the rank and whose producer is not."""
        i, j = state
        both, targets = self._both, self._targets
        arriving = (targets[i] - targets[:i])[:, None] + (targets[j + 1 :] - targets[j])[None, :]
        inner = both[i, i] - both[:i, i] - both[i, :i] + np.diagonal(both)[:i]
        outer = np.diagonal(both)[j + 1 :] - both[j, j + 1 :] - both[j + 1 :, j] + both[j, j]
        across = both[i, j + 1 :][None, :] - both[:i, j + 1 :] - both[i, j] + both[:i, j][:, None]
        lost: Floats = arriving - inner[:, None] - outer[None, :] - across
        return lost

    def crossing_bytes(self, k: int, state: State) -> Floats:
        """Of hidden states and travelling values that come to the rank, and of parted skips."""
        i, j = state
        total = np.zeros((i, self.num_layers - j)) if self._only_clean else self.parted_bytes(k, state)
        if k > 1:
            cut = self.weights.cut_bytes
            total = total + 2.0 * (cut[:i, None] + cut[None, j + 1 :])
        first, last = np.arange(i)[:, None], np.arange(j + 1, self.num_layers + 1)[None, :]
        for value in self.weights.travelling:
            held = _inside(value.source, state, first, last)
            reads = np.logical_or.reduce([_inside(t, state, first, last) for t in value.targets])
            total = total + value.bytes * (reads & ~held)
        return total

    def solve(self, cost: Callable[[int, State], Floats], *, total: bool) -> float:
        """Best value of a key (its sum over ranks when ``total``, else its maximum) on the edges left, or inf."""
        self._edge_cost, self._best = (
            cost,
            [np.full((self.num_layers + 1,) * 2, np.inf) for _ in range(self.num_pairs + 1)],
        )
        self._best[0][0, self.num_layers] = 0.0
        for k in range(1, self.num_pairs + 1):
            for state in self._states[k]:
                reach = self._reach(k, state, total)
                self._best[k][state] = reach.min() if reach.size else np.inf
        return float(np.diagonal(self._best[self.num_pairs]).min())

    def _reach(self, k: int, state: State, total: bool) -> Floats:
        i, j = state
        before = self._best[k - 1][:i, j + 1 :]
        if not np.isfinite(before).any():
            return np.full((1, 1), np.inf)
        cost = self._edge_cost(k, state)
        reach: Floats = before + cost if total else np.maximum(before, cost)
        mask = self.masks.get((k, state))
        return reach if mask is None else np.where(mask, reach, np.inf)

    def limit(self, cost: Callable[[int, State], Floats], most: float) -> None:
        """Drop the edges on which a key exceeds ``most``, and the states that only they reach."""
        for k, state in self._edges():
            self._keep(k, state, cost(k, state) <= most * (1 + _EPS) + _EPS)

    def keep_tight(self) -> None:
        """After ``solve(total=True)``: drop the edges that lie on no optimal path to their state."""
        for k, state in self._edges():
            best = self._best[k][state]
            self._keep(k, state, self._reach(k, state, True) <= best * (1 + _EPS) + _EPS)
        best = self._best[self.num_pairs].diagonal().min()
        for state in self._states[self.num_pairs]:
            if self._best[self.num_pairs][state] > best * (1 + _EPS) + _EPS:
                self.masks[self.num_pairs, state][:] = False

    def drop_states(self, most_rank_ms: float) -> None:
        """After ``solve(rank_ms)``: drop states that are too costly to reach, or leave too much to the inner ranks."""
        most, work = most_rank_ms * (1 + _EPS) + _EPS, self.weights.work_ms
        for k, states in enumerate(self._states):
            left = (self.num_pairs - k) * most
            self._states[k] = [(i, j) for i, j in states if self._best[k][i, j] <= most and work[j] - work[i] <= left]

    def _edges(self) -> list[tuple[int, State]]:
        return [(k, state) for k in range(1, self.num_pairs + 1) for state in self._states[k]]

    def _keep(self, k: int, state: State, mask: Bools) -> None:
        old = self.masks.get((k, state))
        self.masks[k, state] = mask if old is None else old & mask

    def trace(self, total: bool) -> tuple[int, ...]:
        """Boundaries of the first best partition of the last ``solve``."""
        middle = int(np.argmin(np.diagonal(self._best[self.num_pairs])))
        state, down, up = (middle, middle), [middle], []
        for k in range(self.num_pairs, 0, -1):
            reach = self._reach(k, state, total)
            row, column = divmod(int(np.argmin(reach)), reach.shape[1])
            state = (row, state[1] + 1 + column)
            down.insert(0, state[0])
            up.append(state[1])
        return (*down, *up)


def _inside(layer: int, state: State, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> Bools:
    """Per (i', j'): does the rank of [i', i) and [j, j') hold the layer?"""
    i, j = state
    return ((first <= layer) & (layer < i)) | ((j <= layer) & (layer < last))


def _skip_sums(weights: Weights) -> tuple[Floats, Floats]:
    """Bytes of paired skips with source < a and target < b, as [a, b]; and with target < b, as [b]."""
    n = weights.num_layers
    both, targets = np.zeros((n + 1, n + 1)), np.zeros(n + 1)
    for value in weights.paired:
        both[value.source + 1, value.targets[0] + 1] += value.bytes
        targets[value.targets[0] + 1] += value.bytes
    return both.cumsum(axis=0).cumsum(axis=1), targets.cumsum()
