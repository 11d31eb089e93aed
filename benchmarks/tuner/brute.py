"""Is any plan better than the tuner's? Usage: python benchmarks/tuner/brute.py [--write] [CASE ...]

Every choice of a case is planned with every way to cut, with every order of these cuts, and as one that recomputes; the
cuts of the best are then moved by a layer. Each plan goes through :func:`make_plan`, so it is simulated. What bounds
show to be slower than the best is left out. Status 1: a plan is more than 1 % faster than the tuner's, or a reason of
the tuner's is not true.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
from estimated import FINE, Profiles
from narrowing import require_known
from simulated import halved

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.choice import Choice, Trial, Tuning, Verdict
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.clusters import load_cluster
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import adam_ms_per_gb
from deepspeed_pulse.planner import OpenJob, SearchOptions, make_plan, tune
from deepspeed_pulse.planner.job import UNLIMITED_BYTES
from deepspeed_pulse.planner.make import cuts
from deepspeed_pulse.planner.making.maker import TooSlow
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS
from deepspeed_pulse.report.tuning import describe

BEGIN = "<!-- written by brute.py --write -->"
HEAD = (
    "| case | cluster | samples | tuner | plans tried | faster | tuner / fastest | untrue reasons | s |",
    "|---|---|---|---|---|---|---|---|---|",
)
WITHIN = 0.01
ROUNDS = (1, 2, 3)
"""Waves, and half of a loop's rounds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``halves``: the profile says what both halves of a backward take, half of it each.

    ``memory_gb_per_s``: weights are in fp16, whose optimizer replicas share under ZeRO-1 only, and its step is counted.
    """

    name: str
    model: str
    cluster: str
    samples: int
    gb_per_s: float | None = None
    memory_gb: int | None = None
    halves: bool = False
    memory_gb_per_s: float | None = None

    def job(self, profiles: Profiles) -> OpenJob:
        profile, cluster = profiles(self.model), load_cluster(self.cluster)
        if self.gb_per_s is not None:
            slow = Link(bandwidth_gb_per_s=self.gb_per_s, latency_us=20.0)
            cluster = replace(cluster, intra_node=slow, inter_node=slow)
        if self.memory_gb is not None:
            cluster = replace(cluster, memory_bytes=self.memory_gb * 10**9)
        if self.halves:
            profile = halved(profile)
        if self.memory_gb_per_s is not None:
            stepping = adam_ms_per_gb("float16", self.memory_gb_per_s)
            profile = replace(profile, dtype="float16", optimizer_ms_per_gb=stepping)
        return OpenJob(profiles=[profile], cluster=cluster, global_batch=self.samples)


CASES = (
    Case(name="SD 1.5, PCIe", model="sd15", cluster="a100:1x4", samples=16, gb_per_s=12, halves=True),
    Case(name="SDXL, PCIe", model="sdxl", cluster="a100:1x4", samples=16, gb_per_s=12, halves=True),
    Case(name="SDXL", model="sdxl", cluster="h200:1x8", samples=32),
    Case(name="SDXL, two nodes", model="sdxl", cluster="v100:2x4", samples=32, halves=True),
    Case(name="U-ViT-H, PCIe", model="uvit-h", cluster="a100:1x4", samples=24, gb_per_s=12),
    Case(name="U-ViT 2.7 B, full memory", model="uvit-2.7b", cluster="v100:1x8", samples=32, memory_gb=12),
    Case(name="Hunyuan-DiT, slow links", model="hunyuan-dit" + FINE, cluster="v100:1x8", samples=16, gb_per_s=2.5),
    Case(name="PixArt (no skips), slow links", model="pixart-sigma", cluster="v100:1x8", samples=16, gb_per_s=1),
    Case(name="SD 3 (no skips), full memory", model="sd3-medium", cluster="v100:1x8", samples=16, memory_gb=14),
    Case(name="ControlNet, slow links", model="sd15-controlnet", cluster="v100:1x4", samples=16, gb_per_s=2.5),
    Case(name="Kandinsky 3, slow links", model="kandinsky3", cluster="a100:1x8", samples=16, gb_per_s=2.5),
    Case(name="SD 2.1, 16 ranks", model="sd21", cluster="910a:2x8", samples=64, halves=True),
    Case(name="SD 1.5, optimizer", model="sd15", cluster="a100:1x4", samples=16, halves=True, memory_gb_per_s=2039),
    Case(name="U-ViT-H, optimizer", model="uvit-h", cluster="a100:2x2", samples=24, memory_gb_per_s=2039),
)


# -- all plans -----------------------------------------------------------------------------------


@dataclass
class Search:
    """Of plans faster than ``step_ms``, the best so far."""

    job: OpenJob
    step_ms: float
    tried: int = 0
    best: tuple[Choice, Plan] | None = None
    planned: set[Choice] = field(default_factory=set)
    """A plan of them fits."""
    cuts: dict[tuple[object, ...], tuple[int, ...] | None] = field(default_factory=dict)

    def all(self) -> None:
        for choice in choices(self.job):
            made = [
                self._try(choice, options, recompute) for options in self._ways(choice) for recompute in ("auto", "all")
            ]
            for found in {plan.boundaries for plan in made if plan is not None}:
                for options in self._orders(found):
                    self._try(choice, options, "auto")
        while self.best is not None and self._moved(*self.best):
            pass

    def fits(self, choice: Choice) -> bool:
        """Whether a plan does, however slow it is."""
        ways = itertools.product(self._ways(choice), ("all", "auto"))
        return choice in self.planned or any(self._try(choice, *way, math.inf) is not None for way in ways)

    def exceeds(self, choice: Choice, most: float) -> bool:
        """Whether a plan makes more than ``most`` samples/s."""
        within_ms = 1e3 * self.job.global_batch / most
        ways = itertools.product(self._ways(choice), ("auto", "all"))
        plans = (self._try(choice, *way, within_ms) for way in ways)
        steps = (plan.estimate.step_ms for plan in plans if plan is not None and plan.estimate is not None)
        return any(step_ms < within_ms * (1 - 1e-9) for step_ms in steps)

    def _ways(self, choice: Choice) -> Iterator[SearchOptions]:
        """Ways to cut. With several waves or a loop that takes seconds, so it is done once for all microbatches."""
        for part, tolerance in ((True, 0.0), (False, 0.0), (True, 0.1)):
            options = SearchOptions(part_skips=part, tolerance=tolerance)
            if not choice.loop and choice.waves < 2:
                yield options
                continue
            key = (choice.pipeline_ranks, choice.waves, choice.loop, part, tolerance)
            if key not in self.cuts:
                self.cuts[key] = self._cut(choice, options)
            if self.cuts[key] is not None:
                yield SearchOptions(boundaries=self.cuts[key])

    def _cut(self, choice: Choice, options: SearchOptions) -> tuple[int, ...] | None:
        try:
            return cuts(replace(self.job.chosen(choice), memory_bytes=UNLIMITED_BYTES), _placed(options, choice))
        except InfeasibleError:
            return None  # too few layers

    def _orders(self, boundaries: tuple[int, ...]) -> Iterator[SearchOptions]:
        halves = (False, True) if self.job.profiles[0].knows_halves else (False,)
        for schedule, split in itertools.product(GENERATORS, halves):
            yield SearchOptions(boundaries=boundaries, schedule=schedule, split_backward=split)

    def _try(
        self, choice: Choice, options: SearchOptions, recompute: str, within_ms: float | None = None
    ) -> Plan | None:
        """The plan, unless it does not fit or is slower for sure, than the best if nothing else is said."""
        job = replace(self.job.chosen(choice), recompute=recompute)
        shape = "loop" if choice.loop else "wave" if choice.waves else "linear"
        within_ms = self.step_ms if within_ms is None else within_ms
        options = replace(options, placement=shape, waves=choice.waves or 1, solver_seconds=0.0, within_ms=within_ms)
        self.tried += 1
        try:
            plan = make_plan(job, options)
        except (TooSlow, ConfigError, InfeasibleError):
            return None
        self.planned.add(choice)
        assert plan.estimate is not None
        if plan.estimate.step_ms < self.step_ms * (1 - 1e-9):
            self.step_ms, self.best = plan.estimate.step_ms, (choice, plan)
        return plan

    def _moved(self, choice: Choice, plan: Plan) -> bool:
        """One of its cuts, by a layer, makes it faster."""
        before, old = self.step_ms, plan.boundaries
        for at, by in itertools.product(range(1, len(old) - 1), (-1, 1)):
            moved = (*old[:at], old[at] + by, *old[at + 1 :])
            if moved[at - 1] < moved[at] < moved[at + 1]:
                self._try(choice, SearchOptions(boundaries=moved), "auto")
        return self.step_ms < before


def _placed(options: SearchOptions, choice: Choice) -> SearchOptions:
    shape = "loop" if choice.loop else "wave" if choice.waves else "linear"
    return replace(options, placement=shape, waves=choice.waves or 1)


def choices(job: OpenJob) -> Iterator[Choice]:
    """Every one that the tuner could have, and those of three waves or six rounds; a loop of one rank is a wave."""
    for ranks in (count for count in range(1, job.world + 1) if job.world % count == 0):
        group = job.world // ranks
        shapes = [(0, False), *itertools.product(ROUNDS, (False, True) if ranks > 1 else (False,))]
        layouts = Layout if job.cluster.nodes > 1 and 1 < ranks < job.world else (Layout.PIPE_MAJOR,)
        if job.global_batch % group:
            continue
        sizes = job.sizes.dividing(job.global_batch // group)
        for (waves, loop), size, layout, stage in itertools.product(
            shapes, sizes, layouts, (0, 1) if group > 1 else (0,)
        ):
            yield Choice(
                pipeline_ranks=ranks,
                data_parallel=group,
                waves=waves,
                loop=loop,
                microbatch_size=size,
                microbatches=job.global_batch // group // size,
                zero_stage=stage,
                layout=layout,
            )


# -- what the tuner says -------------------------------------------------------------------------


def untrue(tuning: Tuning, search: Search) -> list[str]:
    """Its reasons that the plans found contradict."""
    found = []
    for trial in tuning.rejected:
        if trial.verdict is Verdict.MEMORY and search.fits(trial.choice):
            found.append(f"{describe(trial.choice)}: {trial.verdict.value}, but a plan fits")
        if trial.verdict is Verdict.SLOW and trial.samples_per_second and _beats(trial, search):
            found.append(f"{describe(trial.choice)}: {trial.reason}, but a plan makes more")
    return found


def _beats(trial: Trial, search: Search) -> bool:
    """A plan exceeds a bound; or the best of all what the tuner's own plan makes without regard to memory."""
    assert trial.samples_per_second is not None
    if trial.reason.startswith("at most") and not trial.reason.endswith("found"):
        return search.exceeds(trial.choice, trial.samples_per_second)
    best = search.best is not None and search.best[0] == trial.choice
    return best and 1e3 * search.job.global_batch / search.step_ms > trial.samples_per_second * (1 + 1e-9)


def row(case: Case, profiles: Path) -> tuple[str, bool]:
    """A line of the table, and whether all is well. ``profiles``: folder of estimated ones."""
    spent, job = time.process_time(), case.job(Profiles(profiles))
    tuning = tune(job, solver_seconds=0)
    picked = tuning.best.figures.step_ms
    search = Search(job, picked)
    search.all()
    wrong = untrue(tuning, search)
    ratio = picked / search.step_ms
    better = "none" if search.best is None else describe(search.best[0])
    spent = time.process_time() - spent
    cells = (case.name, _cluster(job.cluster), case.samples, f"{describe(tuning.best.choice)}, {picked:.1f} ms")
    line = " | ".join(str(cell) for cell in (*cells, search.tried, better, f"{ratio:.4f}", len(wrong), f"{spent:.0f}"))
    for text in wrong:
        print(f"{case.name}: {text}", file=sys.stderr)
    return f"| {line} |", ratio <= 1 + WITHIN and not wrong


def _cluster(cluster: Cluster) -> str:
    return f"{cluster.name}, {cluster.intra_node.bandwidth_gb_per_s:g} GB/s, {cluster.memory_bytes / 1e9:.0f} GB"


def _meant(case: Case, part: str) -> bool:
    """A whole name means that case alone."""
    return part == case.name if any(part == one.name for one in CASES) else part in case.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[], help="their names, or parts of them")
    parser.add_argument("--profiles", type=Path, default=Path("out/profiles"), help="folder of estimated profiles")
    parser.add_argument("--processes", type=int, default=2)
    arguments = readme.keep_option(parser, "cases")
    require_known(parser, "cases", arguments.cases, [case.name for case in CASES])
    cases = [case for case in CASES if not arguments.cases or any(_meant(case, part) for part in arguments.cases)]
    lines, well = [*HEAD], True
    print("\n".join(HEAD), flush=True)
    with ProcessPoolExecutor(arguments.processes, initializer=logging.disable, initargs=(logging.WARNING,)) as pool:
        for line, good in pool.map(partial(row, profiles=arguments.profiles), cases):
            print(line, flush=True)
            lines.append(line)
            well &= good
    if arguments.write:
        readme.write(Path(__file__).with_name("README.md"), "\n".join(lines), BEGIN)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
