"""On accelerators: is a step right, as long and as large as planned, and faster than other ways to train?

    python benchmarks/accelerator/run.py --write           # published sizes on all cards of this host
    python benchmarks/accelerator/run.py --small           # small models: on any device, also without a card

Every model trains in bf16 as a wave, as DeepSpeed's 1F1B with relayed skips, and data parallel with DeepSpeed alone,
all in turn. Ends with status 1 where the wave's loss or gradients are not those of the unpartitioned model, or a side
fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
from accelerator.cases import PUBLISHED_CASES, SMALL_CASES, Case
from accelerator.launching import RanksFailed, launch
from accelerator.plans import Machine
from accelerator.report import conditions, section
from narrowing import require_known

from deepspeed_pulse.engine.verifying import available
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.profile import Profile

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- tables: everything below is written by run.py -->"
WITHIN = {"loss": 1e-3, "gradients": 1e-2, "worst": 5e-2}
"""How much loss, all gradients and the worst layer's may differ from the unpartitioned model's, as a share.

Where a value has several readers their gradients are added in another order, in bf16, which shows most in the layer
that makes it (0.9 % in a U-Net on the stand-in).
"""

SMALLEST = 1e-30
"""Of norms: gradients of zero would hide every difference."""

STANDIN = "stand-in"
"""What the device of tests/standin calls itself: its times say nothing of any device."""


def main() -> int:
    options = parse()
    began = time.perf_counter()
    cases = [case for case in options.cases if any(part in case.name for part in options.models or [""])]
    found = []
    for case in cases:
        found.append(measured(case, options))
        print(section(found[-1]), flush=True)
    minutes = (time.perf_counter() - began) / 60
    text = "\n\n".join([conditions(found, options, minutes), *map(section, found)])
    print("\n" + text)
    content = json.dumps(found, indent=1) + "\n"
    if options.out:
        options.out.write_text(content)
    if options.write:
        (HERE / "figures.json").write_text(content)
        readme.write(HERE / "README.md", text, BEGIN)
    missed = [line for case in found for line in misses(case)]
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small models; always so without an accelerator")
    parser.add_argument("--ranks", type=int, help="how many; left out, one a card, two without cards")
    parser.add_argument("--models", nargs="+", metavar="TEXT", help="only models whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3, help="how often all sides are run, in turn")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a side and round")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a side may take, start and all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    options = readme.keep_option(parser, "ranks", "models", "rounds", "steps", "timeout")
    device, devices = available()
    if device == "cpu" and not options.small:
        print("no accelerator here: small models on the CPU", file=sys.stderr)
        options.small = True
    options.ranks = options.ranks or (min(2, devices) if device == "cpu" else devices)
    if options.ranks > devices and device != "cpu":
        parser.error(f"--ranks {options.ranks}: there are {devices} devices here")
    options.cases = SMALL_CASES if options.small else PUBLISHED_CASES
    require_known(parser, "--models", options.models or (), [case.name for case in options.cases])
    return options


def measured(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a case: what does not fit or failed is named."""
    ranks, timeout = options.ranks, options.timeout
    found: dict[str, Any] = {
        "model": case.name,
        "title": case.title,
        "samples": case.samples,
        "ranks": ranks,
        "microbatches": case.microbatches * ranks,
        "sides": {},
        "failed": {},
        "unfit": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = str(folder / "reference.pt")
        try:
            task = {"job": "prepare", "case": case.to_dict(), "reference": reference}
            prepared = launch(task, ranks, timeout=timeout)[0]
        except RanksFailed as problem:
            return {**found, "device": "unknown", "timed": False, "failed": {"measuring": told(problem)}}
        found |= {"device": prepared["device"], "timed": prepared["device"] != STANDIN}
        if prepared["unfit"]:
            found["unfit"]["unpartitioned"] = prepared["unfit"]
        else:
            found["unpartitioned"] = prepared["unpartitioned"]
        machine = Machine(
            profile=Profile.from_json(json.dumps(prepared["profile"])),
            cluster=Cluster.from_json(json.dumps(prepared["cluster"])),
            ranks=ranks,
            microbatches=case.microbatches,
        )
        runs: dict[str, list[Any]] = {}
        jobs = list(sides(case, machine, folder, found))
        rounds = options.rounds if found["timed"] else 1
        for number in range(rounds):
            for side, task in jobs:
                more: dict[str, Any] = {}
                if side == "wave" and side not in runs:
                    more = {"reference": None if prepared["unfit"] else reference, "looks": True}
                try:
                    of_ranks = launch({**task, **more, "steps": options.steps}, ranks, timeout=timeout)
                except RanksFailed as problem:
                    found["failed"][side] = told(problem)
                    continue
                runs.setdefault(side, []).append(of_ranks)
                print(f"[{case.name}] {side}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    found["sides"] = {side: summary(found, of) for side, of in runs.items()}
    if "wave" in runs:
        found |= {"parity": parity(found, runs["wave"][0]), "per_rank": per_rank(runs["wave"][0])}
    return found


def told(problem: RanksFailed) -> str:
    print(problem, file=sys.stderr, flush=True)
    return problem.reason


def sides(case: Case, machine: Machine, folder: Path, found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tasks of those that fit, by the plan."""
    profile, cluster = folder / "profile.json", folder / "cluster.json"
    profile.write_text(machine.profile.to_json())
    cluster.write_text(machine.cluster.to_json())
    pipeline = {"job": "pipeline", "case": case.to_dict(), "microbatches": found["microbatches"]}
    wave = {"placement": "wave", "profile": str(profile), "cluster": str(cluster), "solver_seconds": 2}
    boundaries, relayed = machine.relayed()
    cuts = list(boundaries[1:-1]) or None
    data_parallel = {**pipeline, "job": "data_parallel", "microbatches": case.microbatches}
    for name, lack, task in (
        ("wave", machine.wave(), {**pipeline, "pulse": wave}),
        ("1F1B, relayed", relayed, {**pipeline, "pulse": {"enabled": False}, "cuts": cuts}),
        ("data parallel", machine.data_parallel(), data_parallel),
    ):
        if lack:
            found["unfit"][name] = lack
        else:
            yield name, task


# -- figures ----------------------------------------------------------------------------------


def summary(found: dict[str, Any], rounds: list[Any]) -> dict[str, Any]:
    """Of a side; a step takes what its slowest rank takes."""
    peaks = [rank["allocated_bytes"] for rank in rounds[0]]
    summed: dict[str, Any] = {"allocated_bytes": None if None in peaks else peaks}
    if found["timed"]:
        steps = [max(step) for ranks in rounds for step in zip(*(rank["step_ms"] for rank in ranks), strict=True)]
        summed |= {"step_ms": statistics.median(steps), "lowest_ms": min(steps), "highest_ms": max(steps)}
        if "planned_ms" in rounds[0][0]:
            summed["planned_ms"] = rounds[0][0]["planned_ms"]
    return summed


def parity(found: dict[str, Any], ranks: list[Any]) -> dict[str, Any] | None:
    """How far the wave's first step is from the unpartitioned model's, as shares of that; None: not compared."""
    if "unpartitioned" not in found:
        return None
    alone = found["unpartitioned"]
    layers = {name: layer for rank in ranks for name, layer in rank["gradients"].items()}
    whole, loss = max(alone["gradient_norm"], SMALLEST), alone["loss"]
    shares = {name: share(layer, whole) for name, layer in layers.items()}
    worst = max(shares, key=lambda name: shares[name])
    return {
        "loss": max(abs(rank["loss"] - loss) for rank in ranks) / abs(loss),
        "gradients": sum(layer["difference"] ** 2 for layer in layers.values()) ** 0.5 / whole,
        "worst_layer": worst,
        "worst": shares[worst],
        "layers": len(layers),
    }


def share(layer: dict[str, float], whole: float) -> float:
    """Of a layer's gradient that differs; of nearly nothing, as a share of the model's."""
    return layer["difference"] / max(layer["norm"], 1e-6 * whole)


def per_rank(ranks: list[Any]) -> list[dict[str, Any]]:
    """Of the wave."""
    names = ("allocated_bytes", "counted_bytes", "planned_bytes", "waits")
    return [{name: rank[name] for name in names} for rank in ranks]


def misses(case: dict[str, Any]) -> Iterator[str]:
    yield from (f"{case['title']}: {side}: {why}" for side, why in case["failed"].items())
    compared = case.get("parity")
    if compared is not None:
        for name, most in WITHIN.items():
            if not compared[name] <= most:  # nor where it is no number
                where = f" (layer {compared['worst_layer']})" if name == "worst" else ""
                yield f"{case['title']}: parity, {name}{where}: {compared[name]:.1e}, more than {most}"


if __name__ == "__main__":
    sys.exit(main())
