"""The table of README.md that says what is gained, from the figures of the benchmarks.

Usage: python benchmarks/headline.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import readme

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- written by benchmarks/headline.py -->", "<!-- end of what benchmarks/headline.py writes -->"

NAMES = ("the wave's speed over", "DeepSpeed's 1F1B", "the best other pipeline", "data parallel", "command")
MODELS = {"hunyuan": "Hunyuan-DiT 3 B", "sdxl": "SDXL", "uvit": "U-ViT 2.7 B"}
OURS = ("wave", "linear", "auto", "tuned", "data parallel")


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
    rows = [*slow_network(), *real_compute(), *scale()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (NAMES, ("---",) * len(NAMES), *rows))


def slow_network() -> Iterator[tuple[str, ...]]:
    """Eight ranks, the newest run of every model; links that slow relayed 1F1B down, and links without a limit."""
    found = figures("slow_network/figures.json", {})
    for model, title in MODELS.items():
        runs = found.get(f"{model}-8", ())
        for speed, links in (("ratio 2.5", "slow links"), ("unlimited", "fast links")) if runs else ():
            steps = {side: step for side in runs[0]["sides"] if (step := step_ms(runs[0], side, speed))}
            command = f"`python benchmarks/slow_network/run.py --ranks 8 --models {model}`"
            yield gains(f"{title}, 8 ranks, {links}", steps, command)


def step_ms(run: dict[str, Any], side: str, speed: str) -> float | None:
    found: float | None = run["sides"][side].get(speed, {}).get("step_ms")
    return found


def real_compute() -> Iterator[tuple[str, ...]]:
    for case in figures("real_compute/figures.json", [])[:1]:
        steps = {name: side["step_ms"] for name, side in case["sides"].items()}
        yield gains("a small U-Net, 2 ranks, real arithmetic", steps, "`python benchmarks/real_compute/run.py`")


def scale() -> Iterator[tuple[str, ...]]:
    """Simulated; the largest clusters."""
    for row in figures("scale/figures.json", []):
        if (row["machines"], row["model"], row["ranks"], row["scaling"]) == ("H200", "uvit", 512, "weak"):
            sides = {name.removesuffix(", relayed"): side for name, side in row["sides"].items()}
            steps = {name: 1 / rate for name, side in sides.items() if (rate := side.get("samples_per_second"))}
            yield gains("U-ViT, 512 H200, simulated", steps, "`python benchmarks/scale/run.py`")


def gains(what: str, steps: dict[str, float], command: str) -> tuple[str, ...]:
    """How many times as fast the wave is: over 1F1B, the best other pipeline and the best way without one.

    Nothing where either was not measured.
    """
    without = {name for name in steps if name.startswith(("DDP", "ZeRO"))}
    others = {name for name in steps if not name.startswith((*OURS, "1F1B"))} - without
    return what, over(steps, ["1F1B"]), over(steps, others), over(steps, without), command


def over(steps: dict[str, float], sides: Iterable[str]) -> str:
    best = min((steps[side] for side in sides if side in steps), default=None)
    return "" if best is None or "wave" not in steps else f"{best / steps['wave']:.2f}"


def figures(path: str, nothing: Any) -> Any:
    file = HERE / path
    return json.loads(file.read_text()) if file.exists() else nothing


if __name__ == "__main__":
    sys.exit(main())
