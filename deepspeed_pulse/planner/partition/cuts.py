"""Where to cut the layer list, for a given placement.

Keys, the first first: memory within the limit; the largest load (a rank's compute or a directed link's transfers per
microbatch); the largest stage; bytes that change ranks.

A wave keeps both ends of values with one consumer on one rank if no rank's load becomes more than
``COLLOCATION_WORTH`` times that of the best cuts of all. Where not all of them can stay, the heaviest are kept first,
and the rest is irregular: it stays or travels, whichever is better under the keys. So do values with several consumers
(a time embedding).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from deepspeed_pulse.errors import ConfigError, InfeasibleError, did_you_mean
from deepspeed_pulse.ir.placement import Kind, Placement
from deepspeed_pulse.ir.profile import Profile, Value
from deepspeed_pulse.planner.job import Job
from deepspeed_pulse.planner.partition.contiguous import ConsecutiveCuts
from deepspeed_pulse.planner.partition.cut_costs import CutCosts, Score, in_flight
from deepspeed_pulse.planner.partition.descent import SHIFTS, descent, mirrored, shifted
from deepspeed_pulse.planner.partition.lexicographic import Cuts, MakeSpace, Solution, TooLarge, relaxed, solve
from deepspeed_pulse.planner.partition.nested import NestedCuts

Values = tuple[Value, ...]
Key = Callable[[Cuts], tuple[bool, Score]]

COLLOCATION_WORTH = 1.4
"""Load that may be paid for keeping every pair on its rank; U-Nets with coarse layers pay up to 1.32."""

_ENUMERABLE = 7000
"""C(15, 7) = 6435: all cuts of 16 layers are tried one by one."""

_EVALUATIONS = 10_000
"""Cuts that local search looks at."""

_FEWER_EVALUATIONS = 1_000
"""The same for cuts that count fill and drain, of which several are made."""

_MOST_LAYERS = 100
"""Of models whose cuts are all looked at: for the smallest fullest rank, and for the best load when some values cannot
be kept together. Beyond, the ideal load stands for the best one."""


def partition(job: Job, placement: Sequence[int], *, tolerance: float = 0.0, filling: int = 0) -> Cuts:
    """Boundaries, one more than there are stages: the cuts of :func:`best_partition`.

    ``filling``: loads count fill and drain as spread over so many microbatches; 0: they do not.
    """
    weights = CutCosts(job, placement)
    weights = weights.filling(filling) if filling else weights
    return best_partition(weights, microbatches=job.microbatches, tolerance=tolerance).cuts


def best_partition(weights: CutCosts, *, microbatches: int, tolerance: float = 0.0) -> Solution:
    """Best cuts with their score, a bound on the load, and whether they are proven best.

    Exact for the wave with W = 1 and for linear placement unless the search for irregular values ends early, and for
    any placement of up to 16 layers; else the best found. When memory does not allow what a 1F1B-like order keeps in
    flight, the cuts allow for one microbatch; when not even that, they have the smallest fullest rank (whether a
    schedule fits is for the simulator to say).

    ``tolerance``: bytes come before the largest stage among cuts whose load is at most this share above the best.

    Raises:
        InfeasibleError: fewer layers than stages; says how many are needed.
    """
    require_layers(weights.profile, weights.placement)
    found: Solution | None = None
    for depth in (in_flight(weights.placement, microbatches), (1,) * len(weights.placement)):
        found = _best(weights, depth, tolerance)
        if found and found.score.excess_bytes <= 0:
            return found
    return _least_memory(weights)


def require_layers(profile: Profile, placement: Placement) -> None:
    """Raise an :class:`InfeasibleError` when there are fewer layers than stages."""
    stages, ranks = len(placement), placement.num_ranks
    if profile.num_layers < stages:
        raise InfeasibleError(
            f"{placement.name} placement on {ranks} ranks has {stages} stages and needs at least "
            f"{stages} layers, the model {profile.name!r} has {profile.num_layers}; use fewer ranks or waves, or split "
            "the model into finer layers"
        )


def explicit_cuts(profile: Profile, cuts: Sequence[str]) -> Cuts:
    """Boundaries from the first layer of each stage but the first, by index or by name.

    Raises:
        ConfigError: no layer, or more than one, has such a name.
    """
    names, found = [layer.name for layer in profile.layers], [0]
    for cut in map(str.strip, cuts):
        is_index = cut not in names and cut.isascii() and cut.isdigit() and len(cut) < 10
        if not is_index and names.count(cut) != 1:
            raise ConfigError(
                f"cuts: expected layer indices or names, found {cut!r}, which names {names.count(cut)} layers"
                f"{did_you_mean(cut, names)}"
            )
        found.append(int(cut) if is_index else names.index(cut))
    return (*found, len(names))


def _best(weights: CutCosts, depth: Cuts, tolerance: float) -> Solution | None:
    """The best cuts within memory; None (or cuts above the limit) when there are none."""
    if not (weights.collocates and weights.paired):
        return _solved(weights, depth, tolerance)
    most = COLLOCATION_WORTH * weights.ideal_ms
    kept = _together(weights, weights.paired, depth, tolerance, most)
    heaviest = tuple(sorted(weights.paired, key=lambda value: (-value.both_ways, value.source, value.targets)))
    if not kept and weights.num_layers > _MOST_LAYERS:
        kept = _collocate(weights, (), heaviest, depth, tolerance, most)[1]
    if kept:
        return kept
    free = _solved(weights, depth, tolerance)
    if free is None or free.score.excess_bytes > 0:
        return free
    most = COLLOCATION_WORTH * free.score.load_ms
    return _collocate(weights, (), heaviest, depth, tolerance, most)[1] or free


def _together(weights: CutCosts, values: Values, depth: Cuts, tolerance: float, most: float) -> Solution | None:
    """The best cuts that part none of some values, if their load is at most ``most`` and memory allows them."""
    found = _solved(weights.binding(values), depth, tolerance, most=most)
    return found if found and found.score.excess_bytes <= 0 and found.score.load_ms <= most else None


def _collocate(
    weights: CutCosts, kept: Values, values: Values, depth: Cuts, tolerance: float, most: float
) -> tuple[Values, Solution | None]:
    """Add values to those kept, one by one in order where :func:`_together` allows it; by halves, which is the same."""
    found = _together(weights, kept + values, depth, tolerance, most)
    if found:
        return kept + values, found
    if len(values) == 1:
        return kept, None
    half = len(values) // 2
    kept, first = _collocate(weights, kept, values[:half], depth, tolerance, most)
    kept, second = _collocate(weights, kept, values[half:], depth, tolerance, most)
    return kept, second or first


def _solved(weights: CutCosts, depth: Cuts, tolerance: float, most: float = math.inf) -> Solution | None:
    """The best cuts, of clean ones where those are asked for; may be None if their load is above ``most``."""
    make, found = _space(weights, depth), None
    with contextlib.suppress(TooLarge):
        found = solve(make, weights, depth, tolerance, most) if make else None
        if make and (found is None or found.exact):
            return found
    return _listed(weights, depth, tolerance, found)


def _listed(weights: CutCosts, depth: Cuts, tolerance: float, found: Solution | None) -> Solution | None:
    """From all cuts where they are few, else by local search."""
    if math.comb(weights.num_layers - 1, len(weights.placement) - 1) <= _ENUMERABLE:
        return _enumerated(weights, depth, tolerance)
    return _searched(weights, depth, found)


def _space(weights: CutCosts, depth: Cuts) -> MakeSpace | None:
    """Of the placements that have one."""
    if weights.placement.kind is Kind.LINEAR:
        return lambda most_ms: ConsecutiveCuts(weights, depth, most_ms=most_ms)
    if weights.placement.is_v:
        return lambda most_ms: NestedCuts(weights, depth, most_ms=most_ms)
    return None


def every_cuts(num_layers: int, num_stages: int) -> Iterator[Cuts]:
    """All ways to cut, in lexicographic order."""
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def _enumerated(weights: CutCosts, depth: Cuts, tolerance: float) -> Solution | None:
    """All cuts, one by one."""
    every = every_cuts(weights.num_layers, len(weights.placement))
    scored = [(weights.score(cuts, depth), cuts) for cuts in every if not (weights.clean and weights.parts(cuts))]
    if not scored:
        return None
    least = min(scored)[0]
    score, cuts = min(scored, key=lambda entry: preference(entry[0], least, tolerance))
    return Solution(cuts=cuts, score=score, bound_ms=least.load_ms, exact=True)


def preference(score: Score, least: Score, tolerance: float) -> tuple[float, ...]:
    """What is smallest for the best cuts; ``least`` is the best score without tolerance."""
    if not tolerance:
        return (score.excess_bytes, score.load_ms, score.stage_ms, score.bytes)
    within = max(score.load_ms, least.load_ms * (1 + tolerance))
    return (score.excess_bytes, within, score.bytes)


def _searched(weights: CutCosts, depth: Cuts, found: Solution | None) -> Solution | None:
    """Local search from what is known, or from nested or balanced cuts without regard to memory."""
    cuts = found.cuts if found else _start(weights, depth)

    def key(cuts: Cuts) -> tuple[bool, Score]:
        return weights.clean and weights.parts(cuts), weights.score(cuts, depth)

    cuts = _kicked(key, cuts, min(_EVALUATIONS, _FEWER_EVALUATIONS) if weights.fill else _EVALUATIONS)
    if weights.clean and weights.parts(cuts):
        return None
    bound = found.bound_ms if found else weights.ideal_ms
    return Solution(cuts=cuts, score=weights.score(cuts, depth), bound_ms=bound, exact=False)


def _start(weights: CutCosts, depth: Cuts) -> Cuts:
    free = weights.without_memory()
    found = None
    if weights.collocates:
        with contextlib.suppress(TooLarge):
            found = relaxed(lambda most_ms: NestedCuts(free, depth, most_ms=most_ms), free)
    found = found or relaxed(lambda most_ms: ConsecutiveCuts(free, depth, most_ms=most_ms), free)
    assert found is not None
    return found[0]


def _least_memory(weights: CutCosts) -> Solution:
    """Cuts with the smallest fullest rank, one microbatch in flight."""
    depth = (1,) * len(weights.placement)
    make = _space(weights, depth) if weights.num_layers <= _MOST_LAYERS else None
    if make is None:
        found = _listed(weights, depth, 0.0, None)
        assert found is not None
        return found
    space = make(math.inf)
    space.limit(space.all_memory, space.solve(space.all_memory, total=False))
    space.solve(space.load_ms, total=False)
    cuts = space.trace()
    return Solution(cuts=cuts, score=weights.score(cuts, depth), bound_ms=weights.ideal_ms, exact=False)


def _kicked(key: Key, cuts: Cuts, most: int) -> Cuts:
    """Descents from the best cuts so far with a few of them moved, the same every time."""
    rng = random.Random(0)
    best, cuts, evaluations = descent(key, cuts, mirrored)
    while evaluations < most:
        at = rng.sample(range(1, len(cuts) - 1), min(3, len(cuts) - 2))
        for start in shifted(cuts, {i: rng.choice(SHIFTS) for i in at}):
            value, found, more = descent(key, start, mirrored)
            evaluations += more
            if value < best:
                best, cuts = value, found
        evaluations += 1
    return cuts
