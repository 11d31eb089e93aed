"""Exact balanced cut of the layer list into consecutive stages, one a rank: dynamic program over prefixes.

State (k, b): stages 0..k-1 hold the layers [0, b). Edge (k-1, a) -> (k, b): stage k-1 holds [a, b). Keys as for nested
cuts: each is solved to its optimum and then fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepspeed_pulse.planner.weights import Floats, Weights

Bools = npt.NDArray[np.bool_]
_EPS = 1e-9


def balanced_cuts(weights: Weights, in_flight: Sequence[int], *, least_memory: bool = False) -> tuple[int, ...] | None:
    """Boundaries with the smallest largest stage (or link), then the fewest bytes; None when memory allows none.

    ``least_memory``: the smallest fullest rank comes first, and there is no limit.
    """
    stages = range(len(weights.placement))
    memory = [_between(weights.state) + _between(weights.activations) * in_flight[s] for s in stages]
    work = _between(weights.work_ms)
    load = [np.maximum(work, (weights.cut_bytes * weights.ms_per_byte(s))[:, None]) for s in stages]
    allowed = [_nonempty(weights.num_layers) for _ in stages]
    if least_memory:
        _limit(allowed, memory, _sweep(memory, allowed, total=False)[-1][-1])
    elif weights.memory_bytes is not None:
        _limit(allowed, memory, weights.memory_bytes)
    for key in (load, [work for _ in stages]):
        best = _sweep(key, allowed, total=False)[-1][-1]
        if not np.isfinite(best):
            return None
        _limit(allowed, key, best)
    crossing = _crossing_bytes(weights)
    size = [crossing for _ in stages]
    return _trace(size, allowed, _sweep(size, allowed, total=True))


def _between(prefix: Floats) -> Floats:
    """[a, b]: sum over the layers a..b-1."""
    return prefix[None, :] - prefix[:, None]


def _nonempty(num_layers: int) -> Bools:
    first, last = np.indices((num_layers + 1,) * 2)
    return first < last


def _crossing_bytes(weights: Weights) -> Floats:
    """[a, b]: bytes that come to a stage of layers a..b-1, and their gradients."""
    first, last = np.indices((weights.num_layers + 1,) * 2)
    total: Floats = np.broadcast_to(2.0 * weights.cut_bytes[:, None], first.shape).copy()
    for value in weights.values:
        held = (first <= value.source) & (value.source < last)
        reads = np.logical_or.reduce([(first <= t) & (t < last) for t in value.targets])
        total += value.bytes * (reads & ~held)
    return total


def _limit(allowed: list[Bools], key: list[Floats], most: float) -> None:
    for stage, cost in enumerate(key):
        allowed[stage] = allowed[stage] & (cost <= most * (1 + _EPS) + _EPS)


def _sweep(key: list[Floats], allowed: list[Bools], *, total: bool) -> list[Floats]:
    """Per k, per b: best sum (``total``) or maximum of a key over the stages so far."""
    start = np.full(len(key[0]), np.inf)
    start[0] = 0.0
    best = [start]
    for cost, mask in zip(key, allowed, strict=True):
        best.append(_reach(best[-1], cost, mask, total).min(axis=0))
    return best


def _reach(before: Floats, cost: Floats, mask: Bools, total: bool) -> Floats:
    reach = before[:, None] + cost if total else np.maximum(before[:, None], cost)
    return np.where(mask, reach, np.inf)


def _trace(key: list[Floats], allowed: list[Bools], best: list[Floats]) -> tuple[int, ...]:
    cuts = [len(key[0]) - 1]
    for stage in reversed(range(len(key))):
        reach = _reach(best[stage], key[stage], allowed[stage], True)
        cuts.insert(0, int(np.argmin(reach[:, cuts[0]])))
    return tuple(cuts)
