"""Small models with real arithmetic on two ranks, a core each: this project against what a user would pick instead.

Usage: python benchmarks/real_compute/run.py [--write], as root with iproute2 and two idle cores
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import headline
import readme
from namespaces import bridged
from narrowing import require_known
from ranks import RanksFailed, launch
from real_compute.cases import MODELS, SAMPLES, RealCase
from slow_network import rank
from slow_network.others import other_sides
from slow_network.plans import data_parallel, pipelined, tuned
from slow_network.rank import Job
from slow_network.report import SIDES as ELSEWHERE

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.profile import Profile

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- tables: written by run.py -->"
TIMEOUT = 200.0
SIDES = (*ELSEWHERE, "data parallel")
CLOSE = 0.99
"""Of a side's rate, what is as fast."""


def main() -> int:
    arguments = parse()
    found = [measured(RealCase(name=name), arguments) for name in MODELS]
    text = "\n\n".join(table(case) for case in found)
    print(text)
    if arguments.write:
        (HERE / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
        readme.write(HERE / "README.md", text, BEGIN)
        headline.write()
    missed = [line for case in found for line in promises(case)]
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often all sides are run, in turn")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a side and round, after two to warm up")
    parser.add_argument("--sides", nargs="+", metavar="TEXT", help="only sides whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="one step, nothing kept: does everything run?")
    options = readme.keep_option(parser, "quick", "sides", "rounds", "steps")
    require_known(parser, "--sides", options.sides or (), SIDES)
    return options


def measured(case: RealCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """Step times of every side, and what the tuner chose; a side that fails is named, in one of the rounds too."""
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    times: dict[str, list[list[float]]] = {}
    failed: dict[str, str] = {}
    with bridged(case.ranks) as homes:
        profile = launch(profiled, case.ranks, Job(side="pulse", case=case), namespaces=homes, timeout=TIMEOUT)
        cluster = launch(connected, case.ranks, Job(side="pulse", case=case), namespaces=homes, timeout=TIMEOUT)
        costs, links = Profile.from_json(json.dumps(profile)), Cluster.from_json(json.dumps(cluster))
        ours = our_sides(case, costs, links)
        sides = all_sides(case, costs, ours, steps)
        wanted = arguments.sides or [""]
        jobs = [(name, job) for name, job in sides if any(part in name for part in wanted)]
        for _ in range(rounds):
            for name, job in jobs:
                of_rounds = times.setdefault(name, [])
                of_rounds.append([])
                try:
                    found = launch(pinned, case.ranks, job, namespaces=homes, timeout=TIMEOUT)["free"]
                except RanksFailed as problem:
                    failed[name] = str(problem).splitlines()[0]
                    print(f"{name}: {str(problem)[-3000:]}", file=sys.stderr)
                    continue
                of_rounds[-1] += [step["step_ms"] for step in found]
                print(f"[{case.name}] {name}: {found[-1]['step_ms']:.0f} ms", file=sys.stderr, flush=True)
    figures = {name: summary(case, of_rounds) for name, of_rounds in times.items() if any(of_rounds)}
    return {
        "model": case.name,
        "title": case.title,
        "sides": figures,
        "failed": failed,
        "tuned": ours["tuned"]["told"],
        "data_parallel_over_ddp": paired(times, "data parallel", "DDP"),
    }


def summary(case: RealCase, of_rounds: list[list[float]]) -> dict[str, Any]:
    times = list(itertools.chain(*of_rounds))
    step_ms = statistics.median(times)
    return {
        "step_ms": step_ms,
        "lowest_ms": min(times),
        "highest_ms": max(times),
        "samples_per_second": case.microbatches * SAMPLES / step_ms * 1e3,
        "rounds_ms": [statistics.median(steps) for steps in of_rounds if steps],
    }


def paired(times: Mapping[str, list[list[float]]], name: str, over: str) -> float | None:
    """How many times as fast one side is as another in the same round, the median of rounds that have both.

    A process is faster or slower as a whole, and so is the machine from minute to minute.
    """
    pairs = zip(times.get(name, ()), times.get(over, ()), strict=False)
    ratios = [statistics.median(other) / statistics.median(own) for own, other in pairs if own and other]
    return statistics.median(ratios) if ratios else None


def pinned(job: Job) -> Any:
    """A rank on a core of its own."""
    own_core(int(os.environ["RANK"]))
    return rank.measure(job)


def profiled(job: Job) -> Any:
    own_core(int(os.environ["RANK"]))
    return rank.profile(job)


def connected(job: Job) -> Any:
    own_core(int(os.environ["RANK"]))
    return rank.links(job)


def own_core(index: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})


def our_sides(case: RealCase, profile: Profile, cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {
        "linear": pipelined(case, profile, "linear", cluster),
        "wave": pipelined(case, profile, "wave", cluster),
        "data parallel": data_parallel(case, profile, cluster),
        "tuned": tuned(case, profile, cluster),
    }


def all_sides(
    case: RealCase, profile: Profile, ours: Mapping[str, dict[str, Any]], steps: int
) -> Iterator[tuple[str, Job]]:
    speeds = {"free": None}
    yield from other_sides(case, profile, speeds, steps=steps)
    for name, side in ours.items():
        yield name, Job(side="pulse", case=case, options=side["options"], speeds=speeds, steps=steps)


def promises(case: dict[str, Any]) -> Iterator[str]:
    """What is missed: no side fails, the tuner's choice is as fast as any side, ours data parallel as DDP, the wave as
    DeepSpeed's pipelines on the U-Net."""
    sides, over_ddp = case["sides"], case["data_parallel_over_ddp"]
    yield from (f"{case['title']}: {name} failed: {why}" for name, why in case["failed"].items())
    for name, side in sides.items():
        if "tuned" in sides and sides["tuned"]["step_ms"] > side["step_ms"] / CLOSE:
            yield f"{case['title']}: tuned at least {CLOSE} of {name}"
    if over_ddp is not None and over_ddp < CLOSE:
        yield f"{case['title']}: data parallel at least {CLOSE} of DDP: {over_ddp:.3f} in paired rounds"
    for name in ("1F1B, stock", "1F1B", "DualPipeV, stock", "DualPipeV") if case["model"] == "unet" else ():
        if name in sides and ("wave" not in sides or sides["wave"]["step_ms"] > sides[name]["step_ms"]):
            yield f"{case['title']}: the wave at least as fast as {name}"


def table(case: dict[str, Any]) -> str:
    sides = case["sides"]
    wave = sides.get("wave", {}).get("step_ms")
    lines = [f"### {case['title']}\n", "| side | samples/s | step, ms (lowest to highest) | wave over it |"]
    lines.append("|---|---|---|---|")
    for name, side in sides.items():
        over = f"{side['step_ms'] / wave:.2f}" if wave else "-"
        spread = f"{side['step_ms']:.0f} ({side['lowest_ms']:.0f} to {side['highest_ms']:.0f})"
        note = f" (failed in a round: {case['failed'][name]})" if name in case["failed"] else ""
        lines.append(f"| {name}{note} | {side['samples_per_second']:.1f} | {spread} | {over} |")
    lines += [f"| {name} | failed: {why} | | |" for name, why in case["failed"].items() if name not in sides]
    lines += ["", f"Tuned: {case['tuned']}."]
    if case["data_parallel_over_ddp"] is not None:
        lines[-1] += f" Data parallel over DDP in paired rounds: {case['data_parallel_over_ddp']:.3f}."
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
