"""Schedules against their targets, all sides in one run; the table goes into README.md beside this file.

    python benchmarks/planner/run.py                     # everything: 60 s an instance, about an hour
    python benchmarks/planner/run.py --seconds 10 --seeds 5 --only uncapped capped

Half-stage units: a stage's forward takes 1, its backward 2.
"""

from __future__ import annotations

import argparse
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import wave_placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.planner.heuristics import generators_for
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.simulate import run, summarize
from deepspeed_pulse.planner.synthesize import synthesize
from deepspeed_pulse.planner.validate import check

README = Path(__file__).with_name("README.md")
MARK = "<!-- table: schedules -->"
STASH, HIDDEN = 1000, 10
INSTANT = Link(bandwidth_gb_per_s=1e9, latency_us=0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: an instance, and the makespan it should reach (None: it is only compared)."""

    name: str
    ranks: int
    microbatches: int
    cap: int | None = None
    split: bool = False
    seed: int | None = None
    link: Link = INSTANT
    target: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    case: Case
    generators: dict[str, float]
    makespan: float
    bound: float
    peak: int
    solver: str
    seconds: float

    @property
    def gap(self) -> float:
        return max(0.0, self.makespan / self.bound - 1)

    @property
    def passed(self) -> bool:
        reached = self.case.target is None or self.makespan <= self.case.target + 1e-6
        return reached and self.makespan <= min(self.generators.values()) * (1 + 1e-9)

    def cells(self) -> list[str]:
        case = self.case
        others = ", ".join(f"{name} {span:.2f}" for name, span in sorted(self.generators.items(), key=lambda e: e[1]))
        return [
            case.name + ("" if case.seed is None else f", seed {case.seed}"),
            f"{case.ranks}, {case.microbatches}",
            "" if case.cap is None else str(case.cap),
            "" if case.target is None else f"{case.target:g}",
            f"**{self.makespan:.2f}**",
            f"{self.bound:.2f}",
            f"{100 * self.gap:.2f} %",
            str(self.peak),
            self.solver,
            others,
            f"{self.seconds:.1f}",
            "yes" if self.passed else "NO",
        ]


COLUMNS = (
    "instance", "P, M", "cap", "target", "found", "bound", "gap", "peak", "by", "generators that fit", "s", "met",
)  # fmt: skip


def uncapped(seeds: int) -> Iterator[Case]:
    for ranks, microbatches, bound in ((4, 8, 57), (4, 16, 105), (8, 16, 117), (8, 32, 213)):
        yield Case(name="uniform", ranks=ranks, microbatches=microbatches, target=bound)


def capped(seeds: int) -> Iterator[Case]:
    targets = ((4, 8, 8, 60), (4, 8, 6, 63), (4, 16, 9, 107), (4, 16, 8, 112), (8, 16, 17, 123), (8, 16, 16, 125))
    for ranks, microbatches, cap, target in targets:
        yield Case(name="uniform, capped", ranks=ranks, microbatches=microbatches, cap=cap, target=target)


def split(seeds: int) -> Iterator[Case]:
    for ranks, microbatches, target in ((4, 8, 51), (8, 16, 103)):
        yield Case(
            name="uniform, split", ranks=ranks, microbatches=microbatches, cap=2 * ranks, split=True, target=target
        )


def uneven(seeds: int) -> Iterator[Case]:
    for ranks, microbatches in ((4, 8), (8, 16)):
        for cap in (None, 2 * ranks + 1):
            for seed in range(seeds):
                yield Case(name="uneven", ranks=ranks, microbatches=microbatches, cap=cap, seed=seed)


def uneven_split(seeds: int) -> Iterator[Case]:
    for ranks, microbatches in ((4, 8), (8, 16)):
        for seed in range(seeds):
            yield Case(
                name="uneven, split", ranks=ranks, microbatches=microbatches, cap=2 * ranks, split=True, seed=seed
            )


def messages(seeds: int) -> Iterator[Case]:
    """A message takes 0.3 of a forward: half latency, half bandwidth."""
    link = Link(bandwidth_gb_per_s=HIDDEN / 0.15e-3 / 1e9, latency_us=150.0)
    for ranks, microbatches in ((4, 8), (8, 16)):
        for seed in (None, *range(min(seeds, 3))):
            for cap in (None, 2 * ranks + 1):
                yield Case(name="messages", ranks=ranks, microbatches=microbatches, seed=seed, link=link, cap=cap)


GROUPS: dict[str, Callable[[int], Iterator[Case]]] = {
    "uncapped": uncapped,
    "capped": capped,
    "split": split,
    "messages": messages,
    "uneven": uneven,
    "uneven_split": uneven_split,
}


def costs(case: Case) -> Profile:
    rng = random.Random(case.seed)
    times = [1.0 if case.seed is None else rng.uniform(0.6, 1.4) for _ in range(2 * case.ranks)]
    output = 0 if case.link is INSTANT else HIDDEN
    layers = tuple(
        LayerCost(
            name=f"stage{i}",
            forward_ms=t,
            backward_ms=2 * t,
            param_bytes=0,
            activation_bytes=STASH,
            output_bytes=output,
        )
        for i, t in enumerate(times)
    )
    return Profile(name="bench", device="none", dtype="float32", microbatch_size=1, layers=layers, skips=())


def blank(ranks: int, microbatches: int) -> Plan:
    return Plan(
        pipeline_ranks=ranks,
        data_parallel=1,
        microbatches=microbatches,
        microbatch_size=1,
        waves=1,
        boundaries=tuple(range(2 * ranks + 1)),
        placement=wave_placement(ranks),
        schedule=((),) * ranks,
    )


def cluster(case: Case) -> Cluster:
    return Cluster(
        name="bench",
        nodes=1,
        ranks_per_node=case.ranks,
        memory_bytes=10**15,
        intra_node=case.link,
        inter_node=case.link,
    )


def limit(case: Case) -> int | None:
    """Hidden states that wait are no stash: with messages there is room for them beside it."""
    if case.cap is None:
        return None
    return case.cap * STASH + (0 if case.link is INSTANT else STASH - 1)


def generated(case: Case) -> dict[str, float]:
    """The best makespan of each generator whose order fits the cap."""
    profile, memory = costs(case), limit(case)
    instance = Instance(blank(case.ranks, case.microbatches), profile, cluster(case))
    found: dict[str, float] = {}
    for name, generator in generators_for("auto", instance.placement, split=case.split).items():
        for order in generator.orders(instance, (None,), case.split):
            try:
                figures = summarize(instance, run(instance, order()))
            except InfeasibleError:
                continue
            if memory is None or max(figures.peak_bytes) <= memory:
                found[name] = min(found.get(name, figures.makespan_ms), figures.makespan_ms)
    return found


def solve(case: Case, seconds: float) -> Row:
    profile, plan = costs(case), blank(case.ranks, case.microbatches)
    began = time.perf_counter()
    found = synthesize(
        plan,
        profile,
        cluster=cluster(case),
        memory_bytes=limit(case),
        split_backward=case.split,
        solver_seconds=seconds,
    )
    took = time.perf_counter() - began
    check(found, num_layers=profile.num_layers, values=())
    assert found.estimate is not None and found.solver is not None
    return Row(
        case=case,
        generators=generated(case),
        makespan=found.estimate.makespan_ms,
        bound=found.estimate.lower_bound_ms,
        peak=max(_in_flight(row) for row in found.schedule),
        solver=found.solver.name,
        seconds=took,
    )


def _in_flight(row: tuple[object, ...]) -> int:
    """Most forwards of a rank whose last backward action has not ended."""
    live = peak = 0
    for op in (str(action).strip("0123456789") for action in row):
        live += {"F": 1, "I": 0}.get(op, -1)
        peak = max(peak, live)
    return peak


def summary(rows: list[Row]) -> list[str]:
    """Mean and largest gap per group of seeds; what messages gain over DualPipeV."""
    lines = []
    groups: dict[tuple[str, int, int, int | None], list[Row]] = {}
    for row in rows:
        if row.case.seed is not None and row.case.name.startswith("uneven"):
            key = (row.case.name, row.case.ranks, row.case.microbatches, row.case.cap)
            groups.setdefault(key, []).append(row)
    for (name, ranks, microbatches, cap), group in groups.items():
        gaps = [100 * row.gap for row in group]
        limit_text = "no cap" if cap is None else f"cap {cap}"
        lines.append(
            f"- {name}, P={ranks} M={microbatches}, {limit_text}, {len(group)} seeds: mean gap "
            f"{sum(gaps) / len(gaps):.3f} %, largest {max(gaps):.2f} %"
        )
    over = [1 - row.makespan / row.generators["dualpipev"] for row in rows if _against_dualpipev(row)]
    if over:
        lines.append(
            f"- messages of 0.3 forwards: {100 * min(over):.1f} to {100 * max(over):.1f} % shorter than DualPipeV, "
            f"{100 * sum(over) / len(over):.1f} % on average"
        )
    return lines


def _against_dualpipev(row: Row) -> bool:
    return row.case.name == "messages" and "dualpipev" in row.generators


def large(seconds: float) -> list[str]:
    """P=64, M=256: how long the parts take, and whether the search still finds something."""
    case = Case(name="large", ranks=64, microbatches=256, seed=0)
    profile, plan = costs(case), blank(64, 256)
    began = time.perf_counter()
    instance = Instance(plan, profile, cluster(case))
    order = next(generators_for("dualpipev", instance.placement)["dualpipev"].orders(instance, (None,), False))()
    figures = summarize(instance, run(instance, order))
    check(replace(plan, schedule=order), num_layers=profile.num_layers, values=())
    parts = time.perf_counter() - began
    quick = synthesize(plan, profile, cluster=cluster(case), solver_seconds=0)
    found = synthesize(plan, profile, cluster=cluster(case), solver_seconds=seconds)
    assert quick.estimate is not None and found.estimate is not None and found.solver is not None
    better = quick.estimate.makespan_ms - found.estimate.makespan_ms
    verdict = f"shorter by {better:.3f}" if better > 1e-6 else "the search did not improve on it"
    return [
        f"- P=64, M=256, uneven: DualPipeV {figures.makespan_ms:.2f}; generator, simulator and validator {parts:.1f} s",
        f"- best generator {quick.estimate.makespan_ms:.3f}, with {seconds:g} s of search "
        f"{found.estimate.makespan_ms:.3f} ({found.solver.name}): {verdict}; bound {found.estimate.lower_bound_ms:.3f}",
    ]


def partition_part() -> str:
    """What partition.py prints, where that is there."""
    path = Path(__file__).with_name("partition.py")
    if not path.exists():
        return ""
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    return f"\nCuts (`python benchmarks/planner/partition.py`):\n\n```\n{done.stdout}{done.stderr}```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of an instance")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=[*GROUPS, "large", "partition"], default=None)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    chosen = options.only or [*GROUPS, "large", "partition"]
    rows = []
    for name in (name for name in GROUPS if name in chosen):
        for case in GROUPS[name](options.seeds):
            rows.append(solve(case, options.seconds))
            print(" | ".join(rows[-1].cells()), flush=True)
    lines = summary(rows) + (large(max(60.0, options.seconds)) if "large" in chosen else [])
    print("\n".join(lines))
    parts = [_conditions(options), *lines, "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    parts += ["| " + " | ".join(row.cells()) + " |" for row in rows]
    text = "\n".join(parts) + "\n" + (partition_part() if "partition" in chosen else "")
    if options.write:
        README.write_text(README.read_text(encoding="utf-8").split(MARK)[0] + MARK + "\n\n" + text, encoding="utf-8")
    raise SystemExit(0 if all(row.passed for row in rows) else 1)


def _conditions(options: argparse.Namespace) -> str:
    return (
        f"At most {options.seconds:g} s an instance, one process, Python {platform.python_version()}, "
        f"{platform.machine()}. An instance ends earlier when its bound is reached.\n"
    )


if __name__ == "__main__":
    main()
