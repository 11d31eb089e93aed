"""The table of README.md that says what is gained, from the figures of the benchmarks.

Usage: python benchmarks/headline.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import readme

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- written by benchmarks/headline.py -->", "<!-- end of what benchmarks/headline.py writes -->"


def main() -> int:
    if "--check" not in sys.argv:
        write()
    elif readme.replaced(old := README.read_text(encoding="utf-8"), table(), BEGIN, END) != old:
        print("README.md does not have the newest figures: run python benchmarks/headline.py", file=sys.stderr)
        return 1
    return 0


def write() -> None:
    readme.write(README, table(), BEGIN, END)


def table() -> str:
    rows = [*slow_network(), *real_compute(), *traffic(), *scale()]
    return "\n".join(["| figure | value | command |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def slow_network() -> Iterator[tuple[str, str, str]]:
    """Of every case the newest run and, in brackets, the one before."""
    for runs in figures("slow_network/figures.json", {}).values():
        newest = runs[0]
        title = f"{newest['title']}, {newest['ranks']} ranks: the wave's throughput over"
        value = "; ".join(text for speed in ("ratio 2.5", "unlimited") if (text := gains(runs, speed)))
        yield (
            title,
            value,
            f"`python benchmarks/slow_network/run.py --ranks {newest['ranks']} --models {newest['model']}`",
        )


def gains(runs: list[dict[str, Any]], speed: str) -> str:
    """How many times as fast the wave is as the sides that were measured."""
    found = []
    for side in ("1F1B", "DualPipeV", "ZB-V", "linear"):
        ratios = [
            step_ms / wave for run in runs if (step_ms := step(run, side, speed)) and (wave := step(run, "wave", speed))
        ]
        if ratios:
            again = "".join(f" ({ratio:.2f})" for ratio in ratios[1:])
            found.append(f"{side} {ratios[0]:.2f}{again}")
    links = "unlimited links" if speed == "unlimited" else f"links at {speed}"
    return f"{links}: {', '.join(found)}" if found else ""


def step(run: dict[str, Any], side: str, speed: str) -> float | None:
    """In ms."""
    found: float | None = run["sides"].get(side, {}).get(speed, {}).get("step_ms")
    return found


def real_compute() -> Iterator[tuple[str, str, str]]:
    for case in figures("real_compute/figures.json", []):
        steps = {name: side["step_ms"] for name, side in case["sides"].items()}
        others = ("1F1B, stock", "1F1B", "DualPipeV", "ZB-V", "DDP")
        value = ", ".join(
            f"{name} {steps[name] / steps['wave']:.2f}" for name in others if {name, "wave"} <= steps.keys()
        )
        title = f"real arithmetic, {case['title']}, 2 ranks: the wave's throughput over"
        yield title, value, "`python benchmarks/real_compute/run.py`"


def traffic() -> Iterator[tuple[str, str, str]]:
    for case in figures("slow_network/traffic.json", []):
        wire = {name: side["wire_mib"] for name, side in case["sides"].items()}
        less = ", ".join(f"{1 - wire['wave'] / wire[name]:.1%} less than {name}" for name in ("relayed", "direct"))
        title = f"{case['title']}, {case['ranks']} ranks: bytes on the wire per sample"
        yield title, f"{wire['wave']:.1f} MiB, {less}", "`python benchmarks/slow_network/traffic.py`"


def scale() -> Iterator[tuple[str, str, str]]:
    """Simulated; the largest clusters."""
    rows = [row for row in figures("scale/figures.json", []) if row["ranks"] == 512 and row["scaling"] == "weak"]
    for row in rows:
        rates = {name: side["samples_per_second"] for name, side in row["sides"].items()}
        others = [name for name in ("1F1B, relayed", "ZeRO-2") if name in rates]
        if "wave" not in rates or not others:
            continue
        value = ", ".join(f"{rates['wave'] / rates[name]:.2f} over {name}" for name in others)
        yield (
            f"simulated, {row['model']}, 512 ranks, {row['machines']}: wave",
            value,
            "`python benchmarks/scale/run.py`",
        )


def figures(path: str, nothing: Any) -> Any:
    file = HERE / path
    return json.loads(file.read_text()) if file.exists() else nothing


if __name__ == "__main__":
    sys.exit(main())
