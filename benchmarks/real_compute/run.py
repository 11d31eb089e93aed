"""Small models with real arithmetic on two ranks, a core each: this project against what a user would pick instead.

Usage: python benchmarks/real_compute/run.py [--write], as root with iproute2 and two idle cores
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import headline
import readme
from namespaces import bridged
from ranks import RanksFailed, launch
from real_compute.cases import MODELS, SAMPLES, RealCase
from slow_network import rank
from slow_network.others import other_sides
from slow_network.plans import data_parallel, pipelined, tuned
from slow_network.rank import Job

from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.profile import Profile

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- tables: written by run.py -->"
TIMEOUT = 200.0
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
    parser.add_argument("--rounds", type=int, default=3, help="how often all sides are run, in turn")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a side and round, after two to warm up")
    parser.add_argument("--sides", nargs="+", metavar="TEXT", help="only sides whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="one step, nothing kept: does everything run?")
    return readme.keep_option(parser, "quick", "sides", "rounds", "steps")


def measured(case: RealCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """Step times of every side; a side that fails is named."""
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with bridged(case.ranks) as homes:
        profile = launch(profiled, case.ranks, Job(side="pulse", case=case), namespaces=homes, timeout=TIMEOUT)
        cluster = launch(connected, case.ranks, Job(side="pulse", case=case), namespaces=homes, timeout=TIMEOUT)
        sides = all_sides(case, Profile.from_json(json.dumps(profile)), Cluster.from_json(json.dumps(cluster)), steps)
        wanted = arguments.sides or [""]
        jobs = [(name, job) for name, job in sides if any(part in name for part in wanted)]
        for _ in range(rounds):
            for name, job in jobs:
                try:
                    found = launch(pinned, case.ranks, job, namespaces=homes, timeout=TIMEOUT)["free"]
                except RanksFailed as problem:
                    failed[name] = str(problem).splitlines()[0]
                    print(f"{name}: {str(problem)[-3000:]}", file=sys.stderr)
                    continue
                times.setdefault(name, []).extend(step["step_ms"] for step in found)
                print(f"[{case.name}] {name}: {found[-1]['step_ms']:.0f} ms", file=sys.stderr, flush=True)
    figures = {name: summary(case, of) for name, of in times.items()}
    return {"model": case.name, "title": case.title, "sides": figures, "failed": failed}


def summary(case: RealCase, times: list[float]) -> dict[str, float]:
    step_ms = statistics.median(times)
    rate = case.microbatches * SAMPLES / step_ms * 1e3
    return {"step_ms": step_ms, "lowest_ms": min(times), "highest_ms": max(times), "samples_per_second": rate}


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


def all_sides(case: RealCase, profile: Profile, cluster: Cluster, steps: int) -> Iterator[tuple[str, Job]]:
    speeds = {"free": None}
    yield from other_sides(case, profile, speeds, steps=steps)
    ours = {
        "linear": pipelined(case, profile, "linear", cluster),
        "wave": pipelined(case, profile, "wave", cluster),
        "data parallel": data_parallel(case, profile, cluster),
        "tuned": tuned(case, profile, cluster),
    }
    for name, side in ours.items():
        yield name, Job(side="pulse", case=case, options=side["options"], speeds=speeds, steps=steps)


def promises(case: dict[str, Any]) -> Iterator[str]:
    """What is missed: the tuner's choice is as fast as any side, ours data parallel as DDP, the wave as DeepSpeed's
    pipelines on the U-Net."""
    sides = case["sides"]
    for name, side in sides.items():
        if "tuned" in sides and sides["tuned"]["step_ms"] > side["step_ms"] / CLOSE:
            yield f"{case['title']}: tuned at least {CLOSE} of {name}"
    if {"DDP", "data parallel"} <= sides.keys() and sides["data parallel"]["step_ms"] > sides["DDP"]["step_ms"] / CLOSE:
        yield f"{case['title']}: data parallel at least {CLOSE} of DDP"
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
        lines.append(f"| {name} | {side['samples_per_second']:.1f} | {spread} | {over} |")
    lines += [f"| {name} | failed: {why} | | |" for name, why in case["failed"].items() if name not in sides]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
