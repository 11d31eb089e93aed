"""8 to 512 ranks, by simulation: samples/s of every way to train on published clusters and an H200 one.

Layer costs are operation counts of published models as times of a device that does as many operations a second as the
cluster's published figures say. Usage: python benchmarks/scale/run.py [--write]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import headline
import readme
from simulated import slower, with_relays
from slow_network.cases import MODELS, profile

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.make import make_plan
from deepspeed_pulse.planner.simulate import estimate
from deepspeed_pulse.planner.tuning.sizes import Sizes

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- tables: written by run.py --write -->"
ESTIMATED_TFLOPS = 312.0
"""Of the profiles as ``ds_pulse profile --estimate`` writes them."""
PIPELINES, MICROBATCHES = (2, 4, 8), (1, 2, 4)
MOST_MICROBATCHES = 128
"""Of a step; more would only hide the bubble further."""
UNLIMITED, NODE = 2**62, 8
BYTES_PER_PARAMETER, SHARED = 16, 14
"""Of mixed-precision Adam in all, and the part that ZeRO-2 shares (all but the weights); parameters have two bytes."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Nodes of eight; GB/s inside and between. ``published``: by model and ranks, PULSE, 1F1B, ZeRO-2 in samples/s."""

    name: str
    tflops: float
    memory_gb: int
    inside: float
    between: float
    published: dict[tuple[str, int], tuple[float, float, float]] = field(default_factory=dict)

    def cluster(self, ranks: int) -> Cluster:
        return Cluster(
            name=self.name,
            nodes=max(1, ranks // NODE),
            ranks_per_node=NODE,
            memory_bytes=self.memory_gb * 10**9,
            intra_node=Link(bandwidth_gb_per_s=self.inside, latency_us=10.0),
            inter_node=Link(bandwidth_gb_per_s=self.between, latency_us=20.0),
        )


V100 = Machines(
    name="V100, NVLink",
    tflops=37.0,
    memory_gb=32,
    inside=300.0,
    between=10.0,
    published={("uvit", 16): (141.5, 79.7, 128.1), ("hunyuan", 16): (13.8, 8.6, 11.9)},
)
ASCEND = Machines(
    name="Ascend 910A",
    tflops=16.0,
    memory_gb=32,
    inside=30.0,
    between=19.0,
    published={("uvit", 64): (237.8, 82.7, 103.0), ("hunyuan", 64): (5.4, 4.0, 3.5)},
)
H200 = Machines(name="H200", tflops=400.0, memory_gb=141, inside=450.0, between=50.0)
"""Operations a second of the first two: of U-ViT 2.7 B as published, 4.2 TFLOP a sample, over all ranks."""

SIZES = {V100.name: (8, 16, 64, 512), ASCEND.name: (8, 64, 512), H200.name: (8, 64, 512)}
WEAK_SAMPLES, STRONG_SAMPLES = 8, 512
"""Of a rank, and of all ranks together."""
SIDES = ("wave", "linear", "1F1B, relayed", "ZeRO-2")


@dataclass(frozen=True, kw_only=True)
class Point:
    machines: Machines
    model: str
    ranks: int
    batch: int
    scaling: str
    profile: Profile


def main() -> None:
    arguments = parse()
    began = time.monotonic()
    points = list(all_points(arguments.work / "profiles", arguments.ranks))
    with ProcessPoolExecutor(arguments.processes) as pool:
        found = [
            {
                "machines": point.machines.name,
                "model": point.model,
                "ranks": point.ranks,
                "batch": point.batch,
                "scaling": point.scaling,
                "sides": sides,
            }
            for point, sides in zip(points, pool.map(simulated, points), strict=True)
        ]
    text = "\n".join(tables(found))
    print(text)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if arguments.write:
        (HERE / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
        readme.write(HERE / "README.md", text, BEGIN)
        headline.write()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64, 512], help="sizes to simulate")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("out/slow_network"), help="folder of estimated profiles")
    parser.add_argument("--write", action="store_true", help="put tables and figures beside this file")
    return parser.parse_args()


def all_points(folder: Path, ranks: list[int]) -> Iterator[Point]:
    """Weak and strong scaling; one point where they are the same."""
    for machines, model in itertools.product((V100, ASCEND, H200), ("uvit", "hunyuan")):
        costs = Profile.from_json(json.dumps(profile(model, folder)))
        costs = slower(costs, ESTIMATED_TFLOPS / machines.tflops)
        for size in (size for size in SIZES[machines.name] if size in ranks):
            for scaling, batch in (("weak", WEAK_SAMPLES * size), ("strong", STRONG_SAMPLES)):
                yield Point(machines=machines, model=model, ranks=size, batch=batch, scaling=scaling, profile=costs)


def simulated(point: Point) -> dict[str, Any]:
    """Of each side, the best samples/s of all ways, and which way."""
    best: dict[str, tuple[float, str]] = {}
    for name, rate, way in _ways(point):
        best[name] = max(best.get(name, (0.0, "")), (rate, way))
    return {name: {"samples_per_second": rate, "way": way} for name, (rate, way) in best.items()}


def _ways(point: Point) -> Iterator[tuple[str, float, str]]:
    sizes, cluster = Sizes([point.profile]), point.machines.cluster(point.ranks)
    for samples in MICROBATCHES:
        if point.batch % (point.ranks * samples) == 0:
            yield from _data_parallel(point, sizes.at(samples), cluster, samples)
        for ranks in (ranks for ranks in PIPELINES if ranks <= point.ranks):
            group = point.ranks // ranks
            microbatches, rest = divmod(point.batch, group * samples)
            if rest or not 1 <= microbatches <= MOST_MICROBATCHES:
                continue
            way = f"P={ranks}, {microbatches} microbatches of {samples}"
            for placement, layout in itertools.product(("wave", "linear"), _layouts(point, group)):
                plan = _plan(sizes.at(samples), cluster, ranks, group, microbatches, placement, layout)
                if plan is None:
                    continue
                yield placement, _rate(plan, sizes.at(samples), cluster), way
                if placement == "linear" and layout == Layout.PIPE_MAJOR:  # upstream's only one
                    yield "1F1B, relayed", _rate(with_relays(plan, point.profile), sizes.at(samples), cluster), way


def _layouts(point: Point, group: int) -> tuple[Layout, ...]:
    """All that differ."""
    return tuple(Layout) if point.ranks > NODE and group > 1 else (Layout.PIPE_MAJOR,)


def _plan(
    costs: Profile, cluster: Cluster, ranks: int, group: int, microbatches: int, placement: str, layout: Layout
) -> Plan | None:
    """With a known schedule: what a search adds is for benchmarks/planner. None: memory."""
    try:
        return make_plan(
            costs,
            cluster=cluster,
            pipeline_ranks=ranks,
            data_parallel=group,
            microbatches=microbatches,
            placement=placement,
            schedule="1f1b" if placement == "linear" else "auto",
            solver_seconds=0.0,
            layout=layout,
        )
    except (InfeasibleError, ConfigError):
        return None


def _rate(plan: Plan, costs: Profile, cluster: Cluster) -> float:
    return estimate(plan, costs, cluster).samples_per_second


def _data_parallel(point: Point, costs: Profile, cluster: Cluster, samples: int) -> Iterator[tuple[str, float, str]]:
    """ZeRO-2 where it fits: sums once a step, which favours it, hidden behind backward as far as that lasts."""
    passes = point.batch // (point.ranks * samples)
    params = sum(layer.param_bytes for layer in costs.layers) / 2
    shared = BYTES_PER_PARAMETER - SHARED + SHARED / point.ranks
    needed = params * shared + sum(layer.activation_bytes for layer in costs.layers)
    if needed > cluster.memory_bytes or passes > MOST_MICROBATCHES:
        return
    whole = replace(costs, skips=())
    plan = make_plan(
        whole,
        cluster=cluster,
        pipeline_ranks=1,
        data_parallel=point.ranks,
        microbatches=passes,
        placement="linear",
        solver_seconds=0.0,
        memory_bytes=UNLIMITED,
        shard_optimizer=True,
    )
    yield "ZeRO-2", _rate(plan, whole, cluster), f"{passes} passes of {samples}"


def tables(found: list[dict[str, Any]]) -> Iterator[str]:
    published = {
        (machines.name, model, ranks): figures
        for machines in (V100, ASCEND, H200)
        for (model, ranks), figures in machines.published.items()
    }
    for scaling in ("weak", "strong"):
        size = f"{WEAK_SAMPLES} samples a rank" if scaling == "weak" else f"{STRONG_SAMPLES} samples in all"
        yield f"{scaling.capitalize()} scaling, {size} a step, samples/s:\n"
        ratios = "wave over 1F1B | over ZeRO-2 | published"
        yield f"| cluster | model | ranks | wave | linear, direct | 1F1B, relayed | ZeRO-2 | {ratios} |"
        yield "|---" * 10 + "|"
        for row in (row for row in found if row["scaling"] == scaling):
            known = published.get((row["machines"], row["model"], row["ranks"]))
            yield _row(row, known if scaling == "weak" else None)
        yield ""


def _row(row: dict[str, Any], published: tuple[float, float, float] | None) -> str:
    sides = row["sides"]
    rates = {name: sides.get(name, {}).get("samples_per_second") for name in SIDES}
    cells = [f"{rates[name]:.4g} ({sides[name]['way']})" if rates[name] else "does not fit" for name in SIDES]
    over = [
        f"{rates['wave'] / rates[n]:.2f}" if rates[n] and rates["wave"] else "-" for n in ("1F1B, relayed", "ZeRO-2")
    ]
    beside = "-"
    if published:
        pulse, relayed, zero = published
        beside = f"PULSE {pulse:g}, 1F1B {relayed:g} ({pulse / relayed:.2f}), ZeRO-2 {zero:g} ({pulse / zero:.2f})"
    title = MODELS[row["model"]].title
    return f"| {row['machines']} | {title} | {row['ranks']} | {' | '.join([*cells, *over, beside])} |"


if __name__ == "__main__":
    main()
