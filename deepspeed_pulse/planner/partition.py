"""Where to cut the layer list, for a given placement.

Keys, the first first: memory within the limit; values with one consumer stay on one rank (wave placements); the
largest rank (or link) per microbatch; the largest stage; bytes that cross ranks.

Values with several consumers (a time embedding) travel and do not bind the cuts. If no cuts keep every pair on one
rank, those are taken that part the fewest bytes; the parted values are routed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.placement import describe_placement
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.contiguous import balanced_cuts
from deepspeed_pulse.planner.nested import NestedCuts
from deepspeed_pulse.planner.weights import Weights, in_flight

Cuts = tuple[int, ...]
_ENUMERABLE = 7000
"""C(15, 7) = 6435: all cuts of 16 layers are tried one by one."""


def partition(
    profile: Profile,
    placement: Sequence[int],
    *,
    cluster: Cluster,
    microbatches: int,
    memory_bytes: int | None = None,
    data_parallel: int = 1,
) -> Cuts:
    """Boundaries, one more than there are stages.

    Exact for the wave with W = 1, for linear placement, and for up to 16 layers; else the best found. When memory does
    not allow what a 1F1B-like order keeps in flight, the cuts allow for one microbatch; when not even that, they have
    the smallest fullest rank (whether a schedule fits is for the simulator to say).

    Raises:
        InfeasibleError: fewer layers than stages; says how many are needed.
    """
    require_layers(profile, placement)
    weights = Weights(profile, placement, cluster=cluster, data_parallel=data_parallel, memory_bytes=memory_bytes)
    for depth in (in_flight(placement, microbatches), (1,) * len(placement)):
        cuts = _best_cuts(weights, depth)
        if cuts and weights.score(cuts, depth).excess_bytes <= 0:
            return cuts
    return cuts or _least_memory(weights)


def require_layers(profile: Profile, placement: Sequence[int]) -> None:
    """Raise an :class:`InfeasibleError` when there are fewer layers than stages."""
    stages, ranks = len(placement), max(placement) + 1
    if profile.num_layers < stages:
        raise InfeasibleError(
            f"{describe_placement(tuple(placement))} placement on {ranks} ranks has {stages} stages and needs at least "
            f"{stages} layers, the model {profile.name!r} has {profile.num_layers}; use fewer ranks or waves, or split "
            "the model into finer layers"
        )


def _best_cuts(weights: Weights, depth: Cuts) -> Cuts | None:
    """The best cuts within memory; None (or cuts above the limit) when there are none."""
    kind, stages = describe_placement(weights.placement), len(weights.placement)
    if kind == "linear":
        return balanced_cuts(weights, depth)
    if kind == "wave":
        return nested_cuts(weights, depth, clean=True) or nested_cuts(weights, depth, clean=False)
    if math.comb(weights.num_layers - 1, stages - 1) <= _ENUMERABLE:
        return min(every_cuts(weights.num_layers, stages), key=lambda cuts: weights.score(cuts, depth))
    return _improve(_start(weights, depth), weights, depth)


def every_cuts(num_layers: int, num_stages: int) -> Iterator[Cuts]:
    """All ways to cut, in lexicographic order."""
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def nested_cuts(weights: Weights, depth: Cuts, *, clean: bool) -> Cuts | None:
    """Best nested cuts of stages s and S-1-s as if each such pair had a rank of its own; None when there are none."""
    space = NestedCuts(weights, len(weights.placement) // 2, depth, clean=clean)
    if weights.memory_bytes is not None:
        space.limit(space.memory, weights.memory_bytes)
    if not clean:
        if not math.isfinite(space.solve(space.parted_bytes, total=True)):
            return None
        space.keep_tight()
    largest = space.solve(space.rank_ms, total=False)
    if not math.isfinite(largest):
        return None
    space.drop_states(largest)
    space.limit(space.rank_ms, largest)
    space.limit(space.stage_ms, space.solve(space.stage_ms, total=False))
    space.solve(space.crossing_bytes, total=True)
    return space.trace(total=True)


def _least_memory(weights: Weights) -> Cuts:
    """Cuts with the smallest fullest rank, one microbatch in flight; wave with W = 1 or linear."""
    once = (1,) * len(weights.placement)
    if describe_placement(weights.placement) == "linear":
        return balanced_cuts(weights, once, least_memory=True) or ()
    space = NestedCuts(weights, len(once) // 2, once, clean=False)
    space.limit(space.memory, space.solve(space.memory, total=False))
    space.solve(space.rank_ms, total=False)
    return space.trace(total=False)


def _start(weights: Weights, depth: Cuts) -> Cuts:
    """Where local search begins: nested cuts for a wave, else balanced ones; memory comes later."""
    free = weights.without_memory()
    cuts = None
    if weights.collocates:
        cuts = nested_cuts(free, depth, clean=True) or nested_cuts(free, depth, clean=False)
    cuts = cuts or balanced_cuts(free, depth)
    assert cuts is not None
    return cuts


def _improve(cuts: Cuts, weights: Weights, depth: Cuts) -> Cuts:
    """Move single cuts and mirrored pairs of cuts while the score falls."""
    best = weights.score(cuts, depth)
    improved = True
    while improved:
        improved = False
        for moved in _moves(cuts):
            score = weights.score(moved, depth)
            if score < best:
                cuts, best, improved = moved, score, True
                break
    return cuts


def _moves(cuts: Cuts) -> Iterator[Cuts]:
    last = len(cuts) - 1
    shifts = (-3, -2, -1, 1, 2, 3)
    for at in range(1, last):
        for shift in shifts:
            yield from _shifted(cuts, {at: shift})
    for at in range(1, (last + 1) // 2):
        for shift, other in itertools.product(shifts, repeat=2):
            yield from _shifted(cuts, {at: shift, last - at: other})


def _shifted(cuts: Cuts, shifts: dict[int, int]) -> Iterator[Cuts]:
    moved = tuple(cut + shifts.get(at, 0) for at, cut in enumerate(cuts))
    if all(a < b for a, b in itertools.pairwise(moved)):
        yield moved
