"""Random small partition problems and their solution by trying all cuts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner import Job
from deepspeed_pulse.planner.partition.cut_costs import CutCosts, Score, in_flight
from deepspeed_pulse.planner.partition.cuts import COLLOCATION_WORTH, every_cuts, preference

MICROBATCHES = 4
Key = tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """One problem; ``tolerance`` trades load for bytes."""

    weights: CutCosts
    tolerance: float

    @property
    def stages(self) -> int:
        return len(self.weights.placement)

    @property
    def depths(self) -> list[tuple[int, ...]]:
        """Microbatches in flight that are tried, one after the other."""
        return [in_flight(self.weights.placement, MICROBATCHES), (1,) * self.stages]


def random_case(seed: int) -> Case:
    """Up to 12 layers; nested and irregular skips, slow and fast links, with and without a memory cap."""
    rng = random.Random(seed)
    num_layers = rng.randrange(4, 13)
    waves = [Placement.wave(p, w) for p in range(1, 7) for w in (1, 2)]
    placements = [p for p in waves + [Placement.linear(p) for p in (1, 2, 3, 4, 6)] if len(p) <= num_layers]
    placement = rng.choice(placements)
    profile = Profile(
        name="case",
        device="none",
        dtype="float32",
        microbatch_size=1,
        layers=tuple(_layer(rng, uniform=seed % 2 == 0) for _ in range(num_layers)),
        skips=tuple(_skips(rng, num_layers)),
    )
    link = Link(bandwidth_gb_per_s=rng.choice([1e-4, 3e-4, 1e-3, 1e9]), latency_us=1)
    cluster = Cluster(name="toy", nodes=1, ranks_per_node=8, memory_bytes=10**15, intra_node=link, inter_node=link)
    memory = _memory(
        rng,
        CutCosts(
            Job(profile=profile, cluster=cluster, pipeline_ranks=max(placement) + 1, microbatches=1, memory_bytes=0),
            placement,
        ),
    )
    weights = CutCosts(
        Job(profile=profile, cluster=cluster, pipeline_ranks=max(placement) + 1, microbatches=1, memory_bytes=memory),
        placement,
    )
    return Case(weights, rng.choice([0.0, 0.0, 0.1]))


def _layer(rng: random.Random, *, uniform: bool) -> LayerCost:
    return LayerCost(
        name="layer",
        forward_ms=1.0 if uniform else rng.uniform(0.2, 3),
        backward_ms=2.0 if uniform else rng.uniform(0.2, 6),
        param_bytes=rng.randrange(100),
        activation_bytes=rng.randrange(100),
        output_bytes=rng.randrange(1, 1000),
    )


def _skips(rng: random.Random, num_layers: int) -> Iterable[Skip]:
    """Nested ones; perhaps crossing ones and values with several consumers."""

    def skip(name: str, source: int, target: int, size: int, gradient: bool = True) -> Skip:
        return Skip(name=name, source=source, target=target, bytes=size, gradient=gradient)

    i, j = 0, num_layers - 1
    while i < j - 1:
        if rng.random() < 0.6:
            yield skip(f"nested{i}", i, j, rng.randrange(1, 1000), rng.random() < 0.8)
        i, j = i + rng.randrange(2), j - rng.randrange(1, 3)
    for number in range(rng.choice([0, 0, 1, 4])):
        source = rng.randrange(num_layers - 1)
        target = rng.randrange(source + 1, num_layers)
        yield skip(f"any{number}", source, target, rng.randrange(1, 2000), rng.random() < 0.7)
    for name in rng.choice([(), ("temb",), ("temb", "text")]):
        source, size = rng.randrange(num_layers - 1), rng.randrange(1, 2000)
        for target in range(source + 1, num_layers):
            if rng.random() < 0.6:
                yield skip(name, source, target, size)


def _memory(rng: random.Random, bare: CutCosts) -> int | None:
    """Somewhere between less than the most frugal cuts need and enough for others; or no cap."""
    if rng.random() < 0.5:
        return None
    depth = in_flight(bare.placement, MICROBATCHES)
    needs = sorted(bare.score(c, depth).excess_bytes for c in every_cuts(bare.num_layers, len(bare.placement)))
    return int(needs[rng.randrange(1 + len(needs) // 4)] * rng.choice([0.7, 1.0])) + 1


def brute_force(case: Case) -> tuple[tuple[int, ...], Key]:
    """Depth in flight, and the best key of any cuts under the partitioner's rules."""
    for depth in case.depths:
        best = _brute_force(case, depth)
        if best[0] <= 0:
            break
    return depth, best


def _brute_force(case: Case, depth: tuple[int, ...]) -> Key:
    weights = case.weights
    scores = {cuts: weights.score(cuts, depth) for cuts in every_cuts(weights.num_layers, case.stages)}
    free = best, load = _least(scores.values(), case.tolerance)
    if not weights.collocates or best[0] > 0:
        return best
    kept: list[object] = []
    for value in sorted(weights.paired, key=lambda v: (-v.both_ways, v.source, v.targets)):
        binding = weights.binding([*kept, value])  # type: ignore[list-item]
        together = [score for cuts, score in scores.items() if not binding.parts(cuts)]
        if together:
            key, load = _least(together, case.tolerance)
            if key[0] <= 0 and load <= COLLOCATION_WORTH * free[1]:
                kept.append(value)
                best = key
    return best


def _least(scores: Iterable[Score], tolerance: float) -> tuple[Key, float]:
    """Best key, and its load."""
    listed = list(scores)
    least = min(listed)
    return min((preference(score, least, tolerance), score.load_ms) for score in listed)


def key_of(case: Case, cuts: tuple[int, ...], depth: tuple[int, ...], expected: Key) -> Key:
    """Key of cuts that were found, to be compared with the expected one."""
    score = case.weights.score(cuts, depth)
    if not case.tolerance:
        return (score.excess_bytes, score.load_ms, score.stage_ms, score.bytes)
    return (score.excess_bytes, max(score.load_ms, expected[1]), score.bytes)


def agrees(found: Key, expected: Key) -> bool:
    """Where nothing fits the memory, only what is lacking counts."""
    if expected[0] > 0:
        found, expected = found[:1], expected[:1]
    return all(abs(a - b) <= 1e-6 * max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))
