"""Cuts and schedules against their targets, all sides in one run; the tables go into README.md beside this file.

    python benchmarks/planner/run.py                     # everything: 40 to 90 minutes on 2 quiet cores
    python benchmarks/planner/run.py --seconds 1 --seeds 2 --only uncapped capped

Two problems are solved at a time, each in a process of its own. Ends with status 1 when a promise is missed, and says
which.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bounds
import large
import partition
import published
import quality
import readme
from bounds import Bound
from cases import COLUMNS, GROUPS, Case, Row, solve

README = Path(__file__).with_name("README.md")
MARK = "<!-- tables: everything below is written by run.py -->"
OTHERS = ("partition", "large", "published", "quality")
LARGE_SECONDS = 60.0


def main() -> int:
    options = _options()
    chosen = options.only or [*GROUPS, *OTHERS]
    began = time.perf_counter()
    promises, cuts = _others(options, chosen)
    published_cuts, quality_promises = _quality() if "quality" in chosen else ("", [])
    rows = _schedules(options, chosen)
    promises += bounds.of_rows(rows)
    minutes = (time.perf_counter() - began) / 60
    text = "\n".join([_conditions(options, minutes), bounds.table(promises), *_details(rows, cuts)])
    print("\n".join(["", text, published_cuts]))
    if options.write:
        readme.write(README, text, MARK)
        readme.write(README, published_cuts, quality.BEGIN, quality.END)
    missed = [bound for bound in (*promises, *quality_promises) if not bound.met]
    for bound in missed:
        print(f"MISSED {bound}", file=sys.stderr)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=None, help="at most so many for a problem, to try things out")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--cases", type=int, default=partition.CASES, help="small cases cut by brute force")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="problems at a time")
    parser.add_argument("--only", nargs="*", choices=[*GROUPS, *OTHERS], default=None)
    return readme.keep_option(parser, "seconds", "seeds", "cases", "only")


def _at_most(options: argparse.Namespace, seconds: float) -> float:
    return seconds if options.seconds is None else min(seconds, options.seconds)


def _others(options: argparse.Namespace, chosen: Sequence[str]) -> tuple[list[Bound], str]:
    """The parts that are timed themselves, each in a fresh process; and what partition.py prints."""
    promises: list[Bound] = []
    text = ""
    context = get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        cuts = pool.submit(partition.measure, options.cases) if "partition" in chosen else None
        searched = pool.submit(large.measure, _at_most(options, LARGE_SECONDS)) if "large" in chosen else None
        reproduced = pool.submit(published.measure) if "published" in chosen else None
        if cuts:
            text, found = cuts.result()
            promises += found
        for future in (searched, reproduced):
            promises += future.result() if future else []
    for promise in promises:
        print(promise, flush=True)
    return promises, text


def _quality() -> tuple[str, list[Bound]]:
    """Alone and in a fresh process, which loads the frameworks."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        text, found = pool.submit(quality.measure).result()
    for promise in found:
        print(promise, flush=True)
    return text, found


def _schedules(options: argparse.Namespace, chosen: Sequence[str]) -> list[Row]:
    cases: list[Case] = []
    for name in (name for name in GROUPS if name in chosen):
        cases += [replace(case, seconds=_at_most(options, case.seconds)) for case in GROUPS[name](options.seeds)]
    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(solve, cases):
            rows.append(row)
            print(" | ".join(row.cells()), flush=True)
    return rows


def _conditions(options: argparse.Namespace, minutes: float) -> str:
    limit = "" if options.seconds is None else f", at most {options.seconds:g} s a problem"
    return (
        f"{options.jobs} problems at a time, a process each{limit}; {minutes:.1f} minutes in all; "
        f"Python {platform.python_version()}, {platform.machine()}.\n"
    )


def _details(rows: Sequence[Row], cuts: str) -> list[str]:
    lines = []
    if rows:
        lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(row.cells()) + " |" for row in rows] + [""]
    if cuts:
        lines += ["Cuts (`python benchmarks/planner/partition.py`):", "", "```", cuts, "```", ""]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
