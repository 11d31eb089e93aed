"""Cuts against all other cuts, and how long large models take. Usage: python benchmarks/planner/partition.py

500 random small problems (up to 12 layers; waves and linear placement; nested, crossing and travelling values; memory
caps; slow and fast links; with and without tolerance) solved by the partitioner and by trying every way to cut; then
models of 46 to 500 layers. One process, one core.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.cut_cases import MICROBATCHES, agrees, brute_force, key_of, random_case

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import describe_placement, linear_placement, wave_placement
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner.partition import best_partition
from deepspeed_pulse.planner.weights import Weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    differing = small(parser.parse_args().cases)
    large()
    return 1 if differing else 0


def small(num_cases: int) -> int:
    """How many cases differ from brute force."""
    kinds: Counter[str] = Counter()
    differing, solving, began = 0, 0.0, time.perf_counter()
    for seed in range(num_cases):
        case = random_case(seed)
        start = time.perf_counter()
        found = best_partition(case.weights, microbatches=MICROBATCHES, tolerance=case.tolerance)
        solving += time.perf_counter() - start
        depth, expected = brute_force(case)
        if not agrees(key_of(case, found.cuts, depth, expected), expected):
            differing += 1
            print(f"case {seed} differs: expected {expected}, found {found}")
        kinds[describe_placement(case.weights.placement)] += 1
        kinds["memory cap"] += case.weights.memory_bytes is not None
        kinds["nothing fits"] += expected[0] > 0
        kinds["tolerance"] += case.tolerance > 0
        kinds["values part"] += case.weights.parts(found.cuts)
    print(f"{num_cases} small cases: {differing} differ from brute force")
    print(f"  {solving:.1f} s to solve, {time.perf_counter() - began:.1f} s with brute force")
    print("  of which " + ", ".join(f"{name} {number}" for name, number in kinds.most_common()))
    return differing


def large() -> None:
    rng = random.Random(0)
    print(f"{'layers':>6} {'skips':>5}  {'placement':<12} {'seconds':>7} {'load/ideal':>10} {'bound/ideal':>11} proven")
    for num_layers, num_skips, crossing, placement in (
        (46, 0, 0, wave_placement(4)),
        (46, 12, 0, wave_placement(4)),
        (46, 12, 2, wave_placement(4)),
        (46, 12, 0, linear_placement(8)),
        (100, 0, 0, wave_placement(8)),
        (60, 12, 0, wave_placement(4, 2)),
        (500, 200, 0, wave_placement(32)),
    ):
        profile = model(rng, num_layers, num_skips, crossing)
        weights = Weights(profile, placement, cluster=box(), data_parallel=1, memory_bytes=None)
        start = time.perf_counter()
        found = best_partition(weights, microbatches=64)
        seconds = time.perf_counter() - start
        kind = f"{describe_placement(placement)} {max(placement) + 1}"
        print(
            f"{num_layers:>6} {num_skips + crossing:>5}  {kind:<12} {seconds:>7.2f} "
            f"{found.score.load_ms / weights.ideal_ms:>10.3f} {found.bound_ms / weights.ideal_ms:>11.3f} {found.exact}"
        )
    print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def model(rng: random.Random, num_layers: int, num_skips: int, crossing: int) -> Profile:
    """Uneven layers, nested skips, and some that cross."""
    layers = tuple(
        LayerCost(
            name=str(i),
            forward_ms=rng.uniform(1, 2),
            backward_ms=rng.uniform(2, 4),
            param_bytes=rng.randrange(10**8),
            activation_bytes=rng.randrange(10**8),
            output_bytes=rng.randrange(10**5, 10**6),
        )
        for i in range(num_layers)
    )
    half = num_layers // 2
    sources = sorted(rng.sample(range(half), num_skips))
    targets = sorted(rng.sample(range(half + 1, num_layers), num_skips), reverse=True)
    ends = [*zip(sources, targets, strict=True), *((3 + i, half - 3 + i) for i in range(crossing))]
    skips = tuple(Skip(name=f"skip{i}", source=a, target=b, bytes=500_000) for i, (a, b) in enumerate(ends))
    return Profile(name="model", device="none", dtype="bfloat16", microbatch_size=1, layers=layers, skips=skips)


def box() -> Cluster:
    link = Link(bandwidth_gb_per_s=10.0, latency_us=10.0)
    return Cluster(name="box", nodes=1, ranks_per_node=64, memory_bytes=10**12, intra_node=link, inter_node=link)


if __name__ == "__main__":
    sys.exit(main())
