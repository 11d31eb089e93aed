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

from bounds import Bound
from support.cut_cases import MICROBATCHES, agrees, brute_force, key_of, random_case

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import make_routes
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner import Job
from deepspeed_pulse.planner.job import UNLIMITED_BYTES
from deepspeed_pulse.planner.partition.cut_costs import CutCosts
from deepspeed_pulse.planner.partition.cuts import best_partition

CASES = 500
LARGEST = (500, 200, 0, Placement.wave(32))
LARGE = (
    (46, 0, 0, Placement.wave(4)),
    (46, 12, 0, Placement.wave(4)),
    (46, 12, 1, Placement.wave(4)),
    (46, 12, 0, Placement.linear(8)),
    (100, 0, 0, Placement.wave(8)),
    (60, 12, 0, Placement.wave(4, 2)),
    (500, 200, 2, Placement.wave(32)),
    LARGEST,
)
"""Layers, skips, pairs of them that cross, placement."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES)
    text, bounds = measure(parser.parse_args().cases)
    print(text)
    missed = [bound for bound in bounds if not bound.met]
    for bound in missed:
        print(f"MISSED {bound}", file=sys.stderr)
    return 1 if missed else 0


def measure(num_cases: int) -> tuple[str, list[Bound]]:
    """The text of both parts and what they promise; memory is this process's."""
    lines, equal = small(num_cases)
    more, quick = large()
    return "\n".join([*lines, *more]), [equal, quick]


def small(num_cases: int) -> tuple[list[str], Bound]:
    """Cases that differ from brute force."""
    kinds: Counter[str] = Counter()
    lines, solving, began = [], 0.0, time.perf_counter()
    for seed in range(num_cases):
        case = random_case(seed)
        start = time.perf_counter()
        found = best_partition(case.weights, microbatches=MICROBATCHES, tolerance=case.tolerance)
        solving += time.perf_counter() - start
        depth, expected = brute_force(case)
        if not agrees(key_of(case, found.cuts, depth, expected), expected):
            lines.append(f"case {seed} differs: expected {expected}, found {found}")
        kinds[case.weights.placement.name] += 1
        kinds["memory cap"] += case.weights.memory_bytes is not None
        kinds["nothing fits"] += expected[0] > 0
        kinds["tolerance"] += case.tolerance > 0
        kinds["values part"] += case.weights.parts(found.cuts)
    differing = len(lines)
    lines.append(f"{num_cases} small cases: {differing} differ from brute force")
    lines.append(f"  {solving:.1f} s to solve, {time.perf_counter() - began:.1f} s with brute force")
    lines.append("  of which " + ", ".join(f"{name} {number}" for name, number in kinds.most_common()))
    equal = Bound(
        promise="cuts equal brute force on random small cases",
        figure=f"{differing} of {num_cases} differ",
        met=differing == 0,
    )
    return lines, equal


def large() -> tuple[list[str], Bound]:
    rng = random.Random(0)
    lines = [
        f"{'layers':>6} {'skips':>5} {'crossing':>8}  {'placement':<12} {'seconds':>7} {'load/ideal':>10} "
        f"{'bound/ideal':>11} {'values parted':>13} proven"
    ]
    for num_layers, num_skips, crossing, placement in LARGE:
        profile = model(rng, num_layers, num_skips, crossing)
        weights = CutCosts(
            Job(
                profile=profile,
                cluster=box(),
                pipeline_ranks=max(placement) + 1,
                microbatches=1,
                memory_bytes=UNLIMITED_BYTES,
            ),
            placement,
        )
        start = time.perf_counter()
        found = best_partition(weights, microbatches=64)
        seconds = time.perf_counter() - start
        parted = len({route.name for route in make_routes(found.cuts, placement, profile.values) if route.hops})
        kind = f"{placement.name} {placement.num_ranks}"
        lines.append(
            f"{num_layers:>6} {num_skips:>5} {2 * crossing:>8}  {kind:<12} "
            f"{seconds:>7.2f} {found.score.load_ms / weights.ideal_ms:>10.3f} "
            f"{found.bound_ms / weights.ideal_ms:>11.3f} {parted:>13} {found.exact}"
        )
        if (num_layers, num_skips, crossing, placement) == LARGEST:
            last, exact, parts = seconds, found.exact, parted
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines.append(f"most memory: {memory:.2f} GB")
    quick = Bound(
        promise="500 layers, 200 nested skips, P=32: cut under 10 s and 1 GB on one core",
        figure=f"{last:.2f} s, {memory:.2f} GB, {'proven' if exact else 'not proven'}, {parts} skips travel",
        met=last < 10 and memory < 1 and exact and not parts,
    )
    return lines, quick


def model(rng: random.Random, num_layers: int, num_skips: int, crossing: int) -> Profile:
    """Uneven layers and nested skips, of which some swap their targets."""
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
    for at in range(3, 3 + 4 * crossing, 4):
        targets[at], targets[at + 3] = targets[at + 3], targets[at]
    ends = enumerate(zip(sources, targets, strict=True))
    skips = tuple(Skip(name=f"skip{i}", source=a, target=b, bytes=500_000) for i, (a, b) in ends)
    return Profile(name="model", device="none", dtype="bfloat16", microbatch_size=1, layers=layers, skips=skips)


def box() -> Cluster:
    link = Link(bandwidth_gb_per_s=10.0, latency_us=10.0)
    return Cluster(name="box", nodes=1, ranks_per_node=64, memory_bytes=10**12, intra_node=link, inter_node=link)


if __name__ == "__main__":
    sys.exit(main())
