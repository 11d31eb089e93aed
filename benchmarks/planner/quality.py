"""Cuts of published models: DeepSpeed's partition methods against this project's. Loads torch and DeepSpeed.

python benchmarks/planner/quality.py --write     # about six minutes; the table of README.md
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
from bounds import Bound, table
from estimated import TFLOPS, Profiles, job
from simulated import with_relays

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner import Job, SearchOptions, estimate, make_plan
from deepspeed_pulse.planner.partition.cuts import partition

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- quality: written by run.py and quality.py -->", "<!-- end of quality -->"
MODELS = (
    "uvit-m", "uvit-l", "uvit-h", "uvit-1b", "uvit-2.7b", "unidiffuser", "hunyuan-dit", "sd15", "sd21", "sdxl",
    "sdxl, fine", "sd15-controlnet", "kandinsky3",
)  # fmt: skip
RANKS = (2, 4, 8)
GB_PER_S, LATENCY_US = 10.0, 20.0
"""Of links: between nodes of the PULSE paper's V100 cluster, a rank on each node."""
UNLIMITED = 10**15
REPEATS = 3
"""Timings of a solver on one model; the median counts."""

Cuts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to cut a model, and what comes of it.

    Attributes:
        rank, stage: the busiest rank and the slowest stage over their means.
        relayed_mb: a microbatch's, where values go through every stage between; MB, as ``mb``, is forward and backward.
        solver_ms: until the cuts were known; of ``auto``, until the whole plan was.
    """

    name: str
    rank: float
    stage: float
    mb: float
    relayed_mb: float
    step_ms: float
    solver_ms: float


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    layers: int
    ranks: int
    sides: dict[str, Side | None]
    """By name; None where a stage would be empty or layers are too few."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    options = readme.keep_option(parser, "models")
    text, bounds = measure(options.models)
    print(text)
    if options.write:
        readme.write(README, text, BEGIN, END)
    missed = [bound for bound in bounds if not bound.met]
    for bound in missed:
        print(f"MISSED {bound}", file=sys.stderr)
    return 1 if missed else 0


def measure(models: Sequence[str] = MODELS) -> tuple[str, list[Bound]]:
    """Promises and tables as text, and the promises."""
    logging.disable(logging.WARNING)
    profiles = Profiles(Path("out/profiles"))
    rows = []
    for model in models:
        profile, trained = profiles(model), trained_parameters(model)
        rows += [compared(model, profile, trained, ranks) for ranks in RANKS]
    found = [_best_load(rows), _shorter(rows)]
    return "\n".join([table(found), *_table(rows), "", *_seconds(rows)]), found


def trained_parameters(model: str) -> list[int]:
    """Of every layer: what DeepSpeed's method ``parameters`` counts."""
    from deepspeed_pulse.engine.specs import unwrap

    modules = [unwrap(layer) for layer in job(model).layers]
    return [sum(p.numel() for p in module.parameters() if p.requires_grad) for module in modules]


def compared(model: str, profile: Profile, trained: Sequence[int], ranks: int) -> Row:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    def ours(placement: tuple[int, ...]) -> Cuts:
        return partition(_job(profile, ranks), placement)

    solvers: dict[str, Callable[[], Sequence[int]]] = {
        "uniform": lambda: partition_uniform(profile.num_layers, ranks),
        "parameters": lambda: partition_balanced(list(trained), ranks),
        "linear": lambda: ours(Placement.linear(ranks)),
        "wave": lambda: ours(Placement.wave(ranks)),
    }
    sides = {name: cut(name, solver, profile, ranks) for name, solver in solvers.items()}
    sides["auto"] = planned(profile, ranks)
    return Row(model=model, layers=profile.num_layers, ranks=ranks, sides=sides)


def planned(profile: Profile, ranks: int) -> Side:
    """What the planner chooses by itself: of many cuts and placements those with the shortest step."""
    began = time.process_time()
    plan = make_plan(_job(profile, ranks), SearchOptions(solver_seconds=0.0))
    return _side("auto", plan, profile, (time.process_time() - began) * 1e3)


def _job(profile: Profile, ranks: int) -> Job:
    return Job(profile=profile, cluster=cluster(ranks), pipeline_ranks=ranks, microbatches=2 * ranks)


def cut(name: str, solver: Callable[[], Sequence[int]], profile: Profile, ranks: int) -> Side | None:
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        cuts = tuple(int(at) for at in solver())
        times.append((time.process_time() - began) * 1e3)
    if len(set(cuts)) < len(cuts):
        return None
    plan = make_plan(
        _job(profile, ranks),
        SearchOptions(placement="wave" if name == "wave" else "linear", boundaries=cuts, solver_seconds=0.0),
    )
    return _side(name, plan, profile, statistics.median(times))


def _side(name: str, plan: Plan, profile: Profile, solver_ms: float) -> Side:
    work = [layer.forward_ms + layer.backward_ms for layer in profile.layers]
    stages = [sum(work[i] for i in plan.stage_layers(stage)) for stage in range(plan.num_stages)]
    ranks = [sum(work[i] for i in plan.layers_of(rank)) for rank in range(plan.pipeline_ranks)]
    relayed = estimate(with_relays(plan, profile), profile, cluster(plan.pipeline_ranks))
    assert plan.estimate is not None
    return Side(
        name=name,
        rank=max(ranks) / statistics.mean(ranks),
        stage=max(stages) / statistics.mean(stages),
        mb=plan.estimate.p2p_bytes_per_microbatch / 1e6,
        relayed_mb=relayed.p2p_bytes_per_microbatch / 1e6,
        step_ms=plan.estimate.step_ms,
        solver_ms=solver_ms,
    )


def cluster(ranks: int) -> Cluster:
    link = Link(bandwidth_gb_per_s=GB_PER_S, latency_us=LATENCY_US)
    sizes = {"nodes": ranks, "ranks_per_node": 1, "memory_bytes": UNLIMITED}
    return Cluster(name="quality", **sizes, intra_node=link, inter_node=link)


# -- what is promised ----------------------------------------------------------------------------


def _best_load(rows: Sequence[Row]) -> Bound:
    """Of linear cuts: theirs weigh links too, but here compute is the larger."""
    worse = [
        f"{row.model} P={row.ranks}"
        for row in rows
        for other in ("uniform", "parameters")
        if _worse(row, "linear", other, lambda side: side.rank)
    ]
    return Bound(
        promise="published models: the busiest rank of our linear cuts is never busier than with DeepSpeed's",
        figure=", ".join(worse) or f"{len(rows)} of {len(rows)}",
        met=not worse,
    )


def _shorter(rows: Sequence[Row]) -> Bound:
    worse = [
        f"{row.model} P={row.ranks}, {other}"
        for row in rows
        for other in ("uniform", "parameters")
        if _worse(row, "auto", other, lambda side: side.step_ms)
    ]
    return Bound(
        promise="published models: what the planner chooses has no longer a step than DeepSpeed's cuts",
        figure=", ".join(worse) or f"{len(rows)} of {len(rows)}",
        met=not worse,
    )


def _worse(row: Row, mine: str, other: str, figure: Callable[[Side], float]) -> bool:
    """None has no figure: worse than any."""
    one, two = row.sides[mine], row.sides[other]
    return two is not None and (one is None or figure(one) > figure(two) * (1 + 1e-9))


# -- tables --------------------------------------------------------------------------------------

CUTS = ("uniform", "parameters", "linear", "wave")
SIDES = (*CUTS, "auto")


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        f"Microbatches of one sample, 2P of them; {TFLOPS:g} TFLOP/s a rank, {GB_PER_S:g} GB/s a link. Cells: "
        f"{' / '.join(SIDES)}.\n"
    )
    figures = "busiest rank over mean | slowest stage over mean | MB a microbatch | relayed | step, ms"
    yield f"| model | layers | P | {figures} |"
    yield "|---" * 8 + "|"
    for row in rows:
        cells = [
            _cell(row, lambda side: f"{side.rank:.2f}"),
            _cell(row, lambda side: f"{side.stage:.2f}"),
            _cell(row, lambda side: f"{side.mb:.4g}"),
            _cell(row, lambda side: f"{side.relayed_mb:.4g}", CUTS[:2]),
            _cell(row, lambda side: f"{side.step_ms:.4g}"),
        ]
        yield f"| {row.model} | {row.layers} | {row.ranks} | {' | '.join(cells)} |"


def _cell(row: Row, text: Callable[[Side], str], names: Sequence[str] = SIDES) -> str:
    return " / ".join(text(side) if (side := row.sides[name]) else "-" for name in names)


def _seconds(rows: Sequence[Row]) -> Iterator[str]:
    yield "| cuts by (auto: the whole plan) | found in, ms of processor time: median | longest |"
    yield "|---|---|---|"
    for name in SIDES:
        found = [side.solver_ms for row in rows if (side := row.sides[name])]
        yield f"| {name} | {statistics.median(found):.3g} | {max(found):.3g} |"


if __name__ == "__main__":
    sys.exit(main())
