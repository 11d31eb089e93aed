"""8 to 512 ranks, by simulation: samples/s of every way to train on published clusters and an H200 one.

Layer costs are operation counts of published models as times of a device that does as many operations a second as the
cluster's published figures say. Usage: python benchmarks/scale/run.py [--write]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import headline
import readme
from machines import ASCEND, H200, V100
from sides import OTHERS, SIDES, Point, simulated
from simulated import halved, slower
from slow_network.cases import MODELS, profile
from sources import digest_of

from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.cache import PLANNER_VERSION

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- tables: written by run.py --write -->"
ESTIMATED_TFLOPS = 312.0
"""Of the profiles as ``ds_pulse profile --estimate`` writes them."""
WEAK_SAMPLES, STRONG_SAMPLES = 8, 512
"""Of a rank, and of all ranks together."""
CLUSTERS = (V100, ASCEND, H200)
ALL_SIZES = sorted({size for machines in CLUSTERS for size in machines.sizes})
AHEAD = 0.9999
"""What the tuner chooses over any other side, but for rounding."""
MEAN_AHEAD = 1.05
"""The same over the fastest of them, mean of all rows."""
MODELS_AT_SCALE = ("uvit", "sdv2", "hunyuan")


def main() -> int:
    arguments = parse()
    points = list(all_points(arguments.profiles, arguments.ranks))
    made_by = digest_of(*(HERE / f"{name}.py" for name in ("sides", "machines", "run")))
    known = arguments.work / f"unfinished-{PLANNER_VERSION}-{made_by}.json"  # rows of another planner are others
    rows: dict[str, dict[str, Any]] = json.loads(known.read_text()) if known.exists() else {}
    wanted = [point for point in points if _key(point) not in rows]
    with ProcessPoolExecutor(arguments.processes) as pool:
        until = time.time() + 60 * arguments.minutes
        begun = {pool.submit(simulated_row, point, until): point for point in wanted}
        for done in as_completed(begun):
            point, row = begun[done], done.result()
            if row is not None:
                rows[_key(point)] = row
                write_whole(known, json.dumps(rows))
                print(f"{len(rows)} of {len(points)}: {_key(point)}", file=sys.stderr, flush=True)
    found = [rows[_key(point)] for point in points if _key(point) in rows]
    text = "\n".join(tables(found))
    print(text)
    missed = list(behind(found))
    for line in missed:
        print(line, file=sys.stderr)
    if len(found) < len(points):
        print(f"{arguments.minutes:g} minutes are over: call again with the same options to go on", file=sys.stderr)
        return 3
    left = {key: row for key, row in rows.items() if key not in set(map(_key, points))}
    write_whole(known, json.dumps(left))
    if arguments.write:
        (HERE / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
        readme.write(HERE / "README.md", text, BEGIN)
        headline.write()
    return int(bool(missed))


def simulated_row(point: Point, until: float) -> dict[str, Any] | None:
    """A row as plain data; None where it would have begun later than that (seconds since the epoch)."""
    if time.time() > until:
        return None
    return {
        "machines": point.machines.name,
        "model": point.model,
        "ranks": point.ranks,
        "batch": point.batch,
        "scaling": point.scaling,
        "sides": {name: asdict(side) for name, side in simulated(point).items()},
    }


def _key(point: Point) -> str:
    return f"{point.machines.name}, {point.model}, {point.ranks} ranks, {point.scaling}"


def behind(found: list[dict[str, Any]]) -> Iterator[str]:
    """Rows in which another side, ours or not, is ahead of what the tuner chooses; and a mean that is too low."""
    for row in found:
        best = max(SIDES[:-1], key=partial(_rate, row))
        if _over(row, best) < AHEAD:
            yield f"{_head(row)} {row['scaling']}: {best} {_rate(row, best):.4g}, tuned {_rate(row, 'tuned'):.4g}"
    leads = _leads(found)
    if leads and statistics.mean(leads) < MEAN_AHEAD:
        yield f"tuned over the fastest other side, mean: {statistics.mean(leads):.3f}, expected at least {MEAN_AHEAD}"


def _fastest(found: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Of rows in which another side fits, the fastest."""
    for row in found:
        others = [name for name in OTHERS if _rate(row, name)]
        if others:
            yield row, max(others, key=partial(_rate, row))


def _leads(found: list[dict[str, Any]]) -> list[float]:
    return [_over(row, best) for row, best in _fastest(found)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=ALL_SIZES, choices=ALL_SIZES, help="sizes to simulate")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=120.0, help="then stop; the next call goes on (status 3)")
    parser.add_argument("--work", type=Path, default=Path("out/scale"), help="folder of an unfinished run's rows")
    parser.add_argument("--profiles", type=Path, default=Path("out/slow_network/profiles"), help="estimated profiles")
    return readme.keep_option(parser, "ranks")


def all_points(folder: Path, ranks: list[int]) -> Iterator[Point]:
    """Weak and strong scaling; one point where they are the same."""
    for machines, model in itertools.product(CLUSTERS, MODELS_AT_SCALE):
        costs = Profile.from_json(json.dumps(profile(model, folder)))
        costs = halved(slower(costs, ESTIMATED_TFLOPS / machines.tflops))
        costs = replace(costs, optimizer_ms_per_gb=machines.optimizer_ms_per_gb)
        for size in (size for size in machines.sizes if size in ranks):
            for batch, scaling in {STRONG_SAMPLES: "strong", WEAK_SAMPLES * size: "weak"}.items():
                yield Point(machines=machines, model=model, ranks=size, batch=batch, scaling=scaling, profile=costs)


def tables(found: list[dict[str, Any]]) -> Iterator[str]:
    """Rates; then the setting that each was found with."""
    for scaling in ("weak", "strong"):
        rows = [row for row in found if row["scaling"] == scaling]
        size = f"{WEAK_SAMPLES} samples a rank" if scaling == "weak" else f"{STRONG_SAMPLES} samples in all"
        same = "" if scaling == "weak" else f" ({STRONG_SAMPLES // WEAK_SAMPLES} ranks: above)"
        yield f"{scaling.capitalize()} scaling, {size} a step{same}, samples/s (how many times as fast tuned is):\n"
        yield f"| cluster | model | ranks | {' | '.join(SIDES)} |"
        yield "|---" * (3 + len(SIDES)) + "|"
        yield from (_row(row) for row in rows)
        yield ""
    leads = _leads(found)
    if leads:
        yield (
            f"Tuned over the fastest side that is not ours: {min(leads):.3f} at least, {statistics.mean(leads):.3f} in "
            f"the mean of {len(leads)} rows.\n"
        )
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
