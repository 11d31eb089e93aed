"""The greedy fill and HiGHS's on random small problems. Usage: python benchmarks/fill/compare.py [--problems 100]

Wave pipelines of 2 ranks with uneven stages and one or two frozen parts. A fill is as good as the share of the
possible gain that it reaches: from encoding up front, spread evenly, to the longer of the pipeline alone and all work
divided by the ranks.
"""

from __future__ import annotations

import argparse
import random
import statistics

from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.planner import Job, SearchOptions, make_plan
from deepspeed_pulse.planner.filling.fill import fill_plan

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=4.0, help="of HiGHS for a problem")
    options = parser.parse_args()
    greedy, both = [], []
    for seed in range(options.problems):
        one, other = gains(random.Random(seed), options.seconds)
        greedy.append(one)
        both.append(other)
    shorter = sum(b > g + 1e-9 for g, b in zip(greedy, both, strict=True))
    print(
        f"{options.problems} problems, share of the possible gain, mean and least:\n"
        f"greedy alone        {100 * statistics.mean(greedy):.1f} %, {100 * min(greedy):.1f} %\n"
        f"greedy, then HiGHS  {100 * statistics.mean(both):.1f} %, {100 * min(both):.1f} %; shorter in {shorter}"
    )


def gains(rng: random.Random, seconds: float) -> tuple[float, float]:
    """Shares of the possible gain without and with HiGHS."""
    microbatches = rng.randrange(2, 5)
    layers = tuple(_layer(rng) for _ in range(2 * RANKS))
    profile = Profile(name="random", device="none", dtype="float32", microbatch_size=1, layers=layers)
    cluster = load_cluster("a100:1x8")
    plan = make_plan(
        Job(profile=profile, cluster=cluster, pipeline_ranks=RANKS, microbatches=microbatches),
        SearchOptions(placement="wave", solver_seconds=0.0),
    )
    work = sum(layer.forward_ms + layer.backward_ms for layer in layers)
    parts = _parts(rng, rng.uniform(0.1, 0.6) * work)
    frozen = sum(part.forward_ms for part in parts)
    assert plan.estimate is not None
    alone = plan.estimate.makespan_ms
    up_front = alone + microbatches * frozen / RANKS
    possible = max(alone, microbatches * (work + frozen) / RANKS)
    found = []
    for limit in (0.0, seconds):
        filled = fill_plan(plan, Job.of(plan, profile, cluster, frozen=parts), solver_seconds=limit)
        assert filled.estimate is not None
        found.append((up_front - filled.estimate.makespan_ms) / (up_front - possible))
    return found[0], found[1]


def _layer(rng: random.Random) -> LayerCost:
    return LayerCost(
        name="layer",
        forward_ms=rng.uniform(6, 14),
        backward_ms=rng.uniform(12, 28),
        param_bytes=0,
        activation_bytes=0,
        output_bytes=0,
    )


def _parts(rng: random.Random, work_ms: float) -> list[FrozenPart]:
    """One part, or one that needs another."""
    shares = [[rng.uniform(0.2, 1.0) for _ in range(rng.randrange(2, 7))] for _ in range(rng.randrange(1, 3))]
    scale = work_ms / sum(map(sum, shares))
    return [
        FrozenPart(
            name=f"part{index}",
            needs=(f"part{index - 1}",) if index else (),
            targets=(0,),
            layers=tuple(
                FrozenLayer(name="layer", forward_ms=scale * x, param_bytes=0, output_bytes=0, activation_bytes=0)
                for x in row
            ),
        )
        for index, row in enumerate(shares)
    ]


if __name__ == "__main__":
    main()
