"""Ways to cut as a graph of states, and dynamic programs over it; what nested and consecutive cuts share.

State after k ranks: which layers they hold together. An edge adds one rank. A key is the maximum or the sum of a cost
over the edges of a path. The objective is lexicographic: each key is solved to its optimum by one sweep and then fixed,
a maximum by a limit on every edge, a sum by keeping only edges on which it is tight.

``most_ms`` drops from the start what no path within that compute per rank can use: edges, and states that leave too
much to either side. Any key solved within it is exact among such cuts.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from deepspeed_pulse.planner.cost import Floats
from deepspeed_pulse.planner.partition.cut_costs import CutCosts

S = TypeVar("S")
Bools = npt.NDArray[np.bool_]
Stage = tuple[int, tuple[int, int]]
"""A stage's index, and its first layer and end."""

EPSILON = 1e-9


def slack(most: float) -> float:
    """A limit with room for rounding."""
    return most * (1 + EPSILON) + EPSILON


class CutSpace(abc.ABC, Generic[S]):
    """Edges into a state come as one array over all states before it.

    ``origin``: no rank holds anything yet; ``dimensions``: of an array over states.
    """

    origin: S
    dimensions: int

    def __init__(self, weights: CutCosts, in_flight: tuple[int, ...], num_ranks: int, most_ms: float) -> None:
        self.weights, self.in_flight, self.num_ranks, self.most_ms = weights, in_flight, num_ranks, most_ms
        self.num_layers, work = weights.num_layers, weights.work_ms
        held = list(weights.placement[:num_ranks])
        self._beside_ms, self._beside_bytes = weights.beside_ms[held], weights.beside_bytes[held]
        beyond = (1 - weights.fill) * work
        self._first = np.searchsorted(beyond, work - slack(most_ms), side="left")
        """Per end of a stage, its smallest first layer within ``most_ms``."""
        self._last = np.searchsorted(work, beyond + slack(most_ms), side="right") - 1
        self.states = [self._states_after(k) for k in range(num_ranks + 1)]
        self.masks: dict[tuple[int, S], Bools] = {}
        """Edges that are left after the keys solved so far."""

    @abc.abstractmethod
    def _states_after(self, k: int) -> list[S]: ...

    @abc.abstractmethod
    def _window(self, state: S) -> Any:
        """Index of all states before this one, in an array over states."""

    @property
    def num_edges(self) -> int:
        """How many there are, counted without making anything of them."""
        anywhere = np.broadcast_to(np.False_, (self.num_layers + 1,) * self.dimensions)
        return sum(anywhere[self._window(state)].size for states in self.states[1:] for state in states)

    @abc.abstractmethod
    def _before(self, state: S, flat: int) -> S:
        """State behind a position of the window, flattened."""

    @abc.abstractmethod
    def stages(self, k: int, before: S, state: S) -> tuple[Stage, ...]:
        """What rank k-1 holds."""

    @abc.abstractmethod
    def _busy_ms(self, state: S) -> Floats:
        """Compute of the rank, with fill and drain where they count."""

    @abc.abstractmethod
    def _hidden(self, state: S) -> Floats:
        """Bytes of each directed link to the rank before: hidden states, one way."""

    def load_ms(self, k: int, state: S) -> Floats:
        """Largest of the rank's compute and its links' hidden states; named values not counted."""
        load = np.asarray(self._busy_ms(state) + self._beside_ms[k - 1])
        return np.maximum(load, self._hidden(state) * self.weights.ms_per_byte(k - 1)) if k > 1 else load

    def most_outside_ms(self, k: int) -> float:
        """Compute that the first k ranks may have, other backbones' apart."""
        return slack(self.most_ms) * max(k, 1) - float(self._beside_ms[:k].sum())

    def most_inside_ms(self, k: int, fill: Any = 0.0) -> Any:
        """Compute that the ranks after the first k may have; ``fill``: of what each may have, what is taken."""
        return (slack(self.most_ms) - fill) * (self.num_ranks - k) - float(self._beside_ms[k:].sum())

    def all_memory(self, k: int, state: S) -> Floats:
        """Of the rank, other backbones' included, bytes."""
        return np.asarray(self.memory(k, state) + self._beside_bytes[k - 1])

    @abc.abstractmethod
    def stage_ms(self, k: int, state: S) -> Floats: ...

    @abc.abstractmethod
    def memory(self, k: int, state: S) -> Floats:
        """State of the rank with activations in flight, or with the optimizer's step, bytes."""

    @abc.abstractmethod
    def crossing_bytes(self, k: int, state: S) -> Floats:
        """Of hidden states and values that come to the rank, and their gradients."""

    def solve(self, cost: Callable[[int, S], Floats], *, total: bool) -> float:
        """Best value of a key (its sum over ranks when ``total``, else its maximum) on the edges left, or inf."""
        self._cost, self._total = cost, total
        shape = (self.num_layers + 1,) * self.dimensions
        self.best: list[Any] = [np.full(shape, np.inf) for _ in range(self.num_ranks + 1)]
        self.best[0][self.origin] = 0.0
        for k in range(1, self.num_ranks + 1):
            for state in self.states[k]:
                reach = self._reach(k, state)
                if reach.size:
                    self.best[k][state] = reach.min()
        return min((float(self.best[-1][state]) for state in self.states[-1]), default=np.inf)

    def _reach(self, k: int, state: S) -> Floats:
        before = self.best[k - 1][self._window(state)]
        if not before.size or not np.isfinite(before).any():
            return np.full(1, np.inf)
        cost = self._cost(k, state)
        reach: Floats = before + cost if self._total else np.maximum(before, cost)
        mask = self.masks.get((k, state))
        return reach if mask is None else np.where(mask, reach, np.inf)

    def limit(self, cost: Callable[[int, S], Floats], most: float) -> None:
        """Drop the edges on which a key exceeds ``most``."""
        for k in range(1, self.num_ranks + 1):
            for state in self.states[k]:
                mask = cost(k, state) <= slack(most)
                self.masks[k, state] = self.masks.get((k, state), mask) & mask

    def drop_states(self, most: float) -> None:
        """After ``solve`` of a maximum: drop states that cost more to reach."""
        for k, states in enumerate(self.states):
            self.states[k] = [state for state in states if self.best[k][state] <= slack(most)]

    def before(self, k: int, state: S) -> list[tuple[float, S]]:
        """States before this one by the last key's best value through them, best first."""
        reach = self._reach(k, state).ravel()
        order = np.argsort(reach, kind="stable")
        return [(float(reach[at]), self._before(state, int(at))) for at in order if np.isfinite(reach[at])]

    def ends(self) -> list[tuple[float, S]]:
        """Where all ranks are placed, by the last key, best first."""
        found = [(float(self.best[-1][state]), state) for state in self.states[-1]]
        return sorted((end for end in found if np.isfinite(end[0])), key=lambda end: end[0])

    def trace(self) -> tuple[int, ...]:
        """Boundaries of the first best cuts of the last ``solve``."""
        state, stages = self.ends()[0][1], list[Stage]()
        for k in range(self.num_ranks, 0, -1):
            before = self._before(state, int(np.argmin(self._reach(k, state))))
            stages += self.stages(k, before, state)
            state = before
        return boundaries(stages)


def boundaries(stages: list[Stage]) -> tuple[int, ...]:
    """Of all stages, in any order."""
    ordered = [layers for _, layers in sorted(stages)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ordered)), ordered
    return (0, *(end for _, end in ordered))
