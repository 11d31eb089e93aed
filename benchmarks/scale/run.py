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
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import headline
import readme
from machines import ASCEND, H200, V100
from sides import OTHERS, SIDES, Point, simulated
from simulated import halved, slower
from slow_network.cases import MODELS, profile

from deepspeed_pulse.ir.profile import Profile

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- tables: written by run.py --write -->"
ESTIMATED_TFLOPS = 312.0
"""Of the profiles as ``ds_pulse profile --estimate`` writes them."""
WEAK_SAMPLES, STRONG_SAMPLES = 8, 512
"""Of a rank, and of all ranks together."""
CLUSTERS = (V100, ASCEND, H200)
AHEAD = 0.9999
"""What the tuner chooses over any other side, but for rounding."""
MODELS_AT_SCALE = ("uvit", "sdv2", "hunyuan")


def main() -> int:
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
                "sides": {name: asdict(side) for name, side in sides.items()},
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
    missed = list(behind(found))
    for line in missed:
        print(line, file=sys.stderr)
    return int(bool(missed))


def behind(found: list[dict[str, Any]]) -> Iterator[str]:
    """Rows in which another side is ahead of what the tuner chooses."""
    for row in found:
        others = {name: _rate(row, name) for name in OTHERS if _rate(row, name)}
        best = max(others, key=others.__getitem__, default="")
        if others and _rate(row, "tuned") < AHEAD * others[best]:
            yield f"{_head(row)} {row['scaling']}: {best} {others[best]:.4g}, tuned {_rate(row, 'tuned'):.4g}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64, 512], help="sizes to simulate")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("out/slow_network"), help="folder of estimated profiles")
    return readme.keep_option(parser, "ranks")


def all_points(folder: Path, ranks: list[int]) -> Iterator[Point]:
    """Weak and strong scaling; one point where they are the same."""
    for machines, model in itertools.product(CLUSTERS, MODELS_AT_SCALE):
        costs = Profile.from_json(json.dumps(profile(model, folder)))
        costs = halved(slower(costs, ESTIMATED_TFLOPS / machines.tflops))
        for size in (size for size in machines.sizes if size in ranks):
            for scaling, batch in (("weak", WEAK_SAMPLES * size), ("strong", STRONG_SAMPLES)):
                yield Point(machines=machines, model=model, ranks=size, batch=batch, scaling=scaling, profile=costs)


def tables(found: list[dict[str, Any]]) -> Iterator[str]:
    """Rates; then the setting that each was found with."""
    for scaling in ("weak", "strong"):
        rows = [row for row in found if row["scaling"] == scaling]
        size = f"{WEAK_SAMPLES} samples a rank" if scaling == "weak" else f"{STRONG_SAMPLES} samples in all"
        yield f"{scaling.capitalize()} scaling, {size} a step, samples/s (how many times as fast tuned is):\n"
        yield f"| cluster | model | ranks | {' | '.join(SIDES)} |"
        yield "|---" * (3 + len(SIDES)) + "|"
        yield from (_row(row) for row in rows)
        yield ""
    yield "Published, samples/s; in brackets how many times as fast PULSE is. Beside it ours, simulated:\n"
    yield "| cluster | model | ranks | published | tuned, over 1F1B, relayed, and ZeRO-2 |"
    yield "|---" * 5 + "|"
    yield from _published(found)
    yield "\nThe settings that these rates were found with, weak scaling:\n"
    yield f"| cluster | model | ranks | {' | '.join(SIDES)} |"
    yield "|---" * (3 + len(SIDES)) + "|"
    yield from (_settings(row) for row in found if row["scaling"] == "weak")


def _head(row: dict[str, Any]) -> str:
    return f"| {row['machines']} | {MODELS[row['model']].title} | {row['ranks']} |"


def _row(row: dict[str, Any]) -> str:
    cells = []
    for name in SIDES:
        rate, over = _rate(row, name), _over(row, name)
        cells.append(f"{rate:.4g}" + (f" ({over:.2f})" if over and name != "tuned" else "") if rate else "does not fit")
    return f"{_head(row)} {' | '.join(cells)} |"


def _rate(row: dict[str, Any], name: str) -> float:
    found: float = row["sides"].get(name, {}).get("samples_per_second", 0.0)
    return found


def _over(row: dict[str, Any], name: str) -> float:
    """How many times as fast the tuner's choice is; 0 where one of them does not fit."""
    rate = _rate(row, name)
    return _rate(row, "tuned") / rate if rate else 0.0


def _published(found: list[dict[str, Any]]) -> Iterator[str]:
    for row in (row for row in found if row["scaling"] == "weak"):
        machines = next(machines for machines in CLUSTERS if machines.name == row["machines"])
        known = machines.published.get((row["model"], row["ranks"]))
        if known:
            over = ", ".join(f"{_over(row, name):.2f}" for name in ("1F1B, relayed", "ZeRO-2"))
            yield f"{_head(row)} {known} | {_rate(row, 'tuned'):.4g}, {over} |"


def _settings(row: dict[str, Any]) -> str:
    return f"{_head(row)} {' | '.join(row['sides'].get(name, {}).get('way', '-') for name in SIDES)} |"


if __name__ == "__main__":
    sys.exit(main())
