"""The tables of README.md that say what is gained, from the figures of the benchmarks.

Usage: python benchmarks/headline.py [--check]
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import readme

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- written by benchmarks/headline.py -->", "<!-- end of what benchmarks/headline.py writes -->"


def main() -> int:
    if "--check" not in sys.argv:
        write()
    elif readme.replaced(old := README.read_text(encoding="utf-8"), tables(), BEGIN, END) != old:
        print("README.md does not have the newest figures: run python benchmarks/headline.py", file=sys.stderr)
        return 1
    return 0


def write() -> None:
    readme.write(README, tables(), BEGIN, END)


def tables() -> str:
    return "\n\n".join([*slow_network(), *real_compute(), *traffic(), *scale()])


def slow_network() -> Iterator[str]:
    """Of every case the newest run and, in brackets, the one before."""
    sides = ("1F1B", "DualPipeV", "ZB-V", "linear")
    rows = [
        (f"{runs[0]['title']}, `{runs[0]['model']}`", runs[0]["ranks"], speed, *(gain(runs, speed, s) for s in sides))
        for runs in figures("slow_network/figures.json", {}).values()
        for speed in ("ratio 2.5", "unlimited")
    ]
    intro = (
        "The wave's throughput over others' on layers that sleep, on unlimited links and on those at which a step of "
        "1F1B takes 2.5 times longer in addition; in brackets the run before. "
        "`python benchmarks/slow_network/run.py --ranks 4 --models uvit`:"
    )
    yield from table(intro, ("model", "ranks", "links", *sides[:-1], "linear, ours"), rows)


def gain(runs: list[dict[str, Any]], speed: str, side: str) -> str:
    """How many times as fast the wave is."""
    ratios = [
        f"{step_ms / wave:.2f}"
        for run in runs
        if (step_ms := step(run, side, speed)) and (wave := step(run, "wave", speed))
    ]
    return " ".join([*ratios[:1], *(f"({ratio})" for ratio in ratios[1:])])


def step(run: dict[str, Any], side: str, speed: str) -> float | None:
    """In ms."""
    found: float | None = run["sides"].get(side, {}).get(speed, {}).get("step_ms")
    return found


def real_compute() -> Iterator[str]:
    sides, rows = ("1F1B, stock", "1F1B", "DualPipeV", "ZB-V", "DDP"), []
    for case in figures("real_compute/figures.json", []):
        steps = {name: side["step_ms"] for name, side in case["sides"].items()}
        known = "wave" in steps
        over = (f"{steps[name] / steps['wave']:.2f}" if known and name in steps else "" for name in sides)
        rows.append((case["title"], *over))
    intro = "The same with real arithmetic on two ranks, a core each. `python benchmarks/real_compute/run.py`:"
    yield from table(intro, ("model", *sides), rows)


def traffic() -> Iterator[str]:
    rows = []
    for case in figures("slow_network/traffic.json", []):
        wire = {name: side["wire_mib"] for name, side in case["sides"].items()}
        less = (f"{1 - wire['wave'] / wire[name]:.1%}" for name in ("relayed", "direct"))
        rows.append((case["title"], case["ranks"], f"{wire['wave']:.2f}", *less))
    intro = "Bytes on the wire at published sizes, forward and backward. `python benchmarks/slow_network/traffic.py`:"
    yield from table(intro, ("model", "ranks", "MiB a sample", "less than relayed", "less than sent directly"), rows)


def scale() -> Iterator[str]:
    """Simulated; the largest clusters."""
    sides, rows = ("1F1B, relayed", "DualPipeV, relayed", "ZB-V, relayed", "ZeRO-2"), []
    for row in figures("scale/figures.json", []):
        rates = {name: side["samples_per_second"] for name, side in row["sides"].items()}
        if row["ranks"] == 512 and row["scaling"] == "weak" and "wave" in rates:
            over = (f"{rates['wave'] / rates[name]:.2f}" if name in rates else "" for name in sides)
            rows.append((row["machines"], row["model"], *over))
    intro = "The wave's throughput over others' on 512 ranks, simulated. `python benchmarks/scale/run.py`:"
    yield from table(intro, ("machines", "model", *sides), rows)


def table(intro: str, names: Iterable[str], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    """Nothing without rows."""
    lines = [tuple(names), *rows]
    lines.insert(1, ("---",) * len(lines[0]))
    if rows:
        yield (
            textwrap.fill(intro, 120, break_on_hyphens=False)
            + "\n\n"
            + "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        )


def figures(path: str, nothing: Any) -> Any:
    file = HERE / path
    return json.loads(file.read_text()) if file.exists() else nothing


if __name__ == "__main__":
    sys.exit(main())
