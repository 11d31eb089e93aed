"""Several backbones on the same ranks: cuts beside the best by brute force, and plans that are sound."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from toys import cluster, job_on, layer, profile, skip

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.ir.backbones import BackboneLayers
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, SearchOptions, check, estimate, make_plan
from deepspeed_pulse.planner.partition.cuts import every_cuts
from deepspeed_pulse.planner.partition.joint import joint_partition

NAMES = ("base", "middle", "last")


def several(rng: random.Random, *counts: int) -> Profile:
    """Backbones of so many uneven layers."""
    layers = [
        layer(rng.uniform(0.2, 3), rng.uniform(0.2, 6), param_bytes=rng.randrange(99)) for _ in range(sum(counts))
    ]
    ends = list(itertools.accumulate(counts, initial=0))
    parts = (
        BackboneLayers(name=name, layers=pair) for name, pair in zip(NAMES, itertools.pairwise(ends), strict=False)
    )
    return replace(profile(layers), backbones=tuple(parts))


def load_ms(costs: Profile, placement: Placement, cuts) -> float:
    """Of the rank that has most to do."""
    ranks = [0.0] * placement.num_ranks
    for stage, (first, end) in enumerate(itertools.pairwise(cuts)):
        ranks[placement[stage]] += sum(x.forward_ms + x.backward_ms for x in costs.layers[first:end])
    return max(ranks)


def every_joint_cuts(costs: Profile, placement: Placement):
    """All ways to cut all backbones."""
    pairs = list(zip(costs.backbones, placement.parts, strict=True))
    ways = [every_cuts(part.layers[1] - part.layers[0], len(place)) for part, place in pairs]
    for found in itertools.product(*ways):
        starts = [part.layers[0] for part in costs.backbones]
        yield (*(a + cut for a, cuts in zip(starts, found, strict=True) for cut in cuts[:-1]), costs.num_layers)


@pytest.mark.parametrize("seed", range(16))
def test_joint_cuts_are_close_to_the_best_there_are(seed):
    rng = random.Random(seed)
    one, other = rng.choice(
        [(Placement.linear(3),) * 2, (Placement.wave(2),) * 2, (Placement.wave(2), Placement.linear(2))]
    )
    placement = Placement.of_backbones([one, rng.choice([other, other.mirrored])])
    costs = several(rng, rng.randrange(6, 9), rng.randrange(5, 8))
    cuts = joint_partition(job_on(placement, costs, microbatches=4), placement)
    best = min(load_ms(costs, placement, found) for found in every_joint_cuts(costs, placement))
    assert load_ms(costs, placement, cuts) <= 1.015 * best


@pytest.mark.parametrize(("kind", "count"), [("auto", 3), ("wave", 2), ("loop", 2)])
def test_plans_of_several_backbones_are_sound(kind, count):
    costs = several(random.Random(count), *(5,) * count)
    skips = [skip(f"{part.name}.s", part.layers[0], part.layers[1] - 1, 10) for part in costs.backbones]
    costs = replace(costs, skips=tuple(skips))
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2)
    found = make_plan(job, SearchOptions(placement=kind, solver_seconds=0))
    check(found, num_layers=costs.num_layers, values=costs.values)
    assert estimate(found, costs, cluster()) == found.estimate
    assert [part.name for part in found.backbones] == list(NAMES[:count])
    kept = make_plan(job, SearchOptions(placement=kind, solver_seconds=0, boundaries=found.boundaries))
    assert kept.boundaries == found.boundaries


def test_a_placement_that_backbones_do_not_have_is_named():
    job = Job(profile=several(random.Random(0), 4, 4), cluster=cluster(), pipeline_ranks=2, microbatches=1)
    with pytest.raises(ConfigError, match="expected one of auto, wave, linear, loop, found 'wavy'"):
        make_plan(job, SearchOptions(placement="wavy"))
