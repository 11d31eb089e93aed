"""What comes before the first step: this project's start beside DeepSpeed's own.

    python benchmarks/start_up/run.py --write     # about 3 minutes on 2 quiet cores

Layers are Stable Diffusion's in number and kind, narrow. Every start is made of fresh processes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import readme
import torch
from ranks import launch
from real_compute.cases import SAMPLES, RealCase
from resting import Resting
from slow_network.sides import relayed

from deepspeed_pulse import PipelineModule

README = Path(__file__).with_name("README.md")
MARK = "<!-- tables: everything below is written by run.py -->"
STEPS = 3
"""After the first one."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """``kept``: this project's ``plan_cache``; None: DeepSpeed's own pipeline. ``pulse``: more of the block."""

    case: RealCase
    kept: str | None = None
    pulse: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    options = parse()
    imports = [imported("deepspeed"), imported("deepspeed, deepspeed_pulse.engine.engine")]
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for name, figures in one_round(RealCase(name="unet", ranks=options.ranks)):
            rows.setdefault(name, []).append(figures)
            print(f"{name}: {figures}", file=sys.stderr, flush=True)
    text = "\n".join([conditions(options), imports_line(imports), "", table(rows)])
    print(text)
    if options.write:
        readme.write(README, text, MARK)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="how often every start is made, all in turn")
    return readme.keep_option(parser, "ranks", "rounds")


def imported(modules: str) -> float:
    """Seconds of a fresh interpreter, the least of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, capture_output=True, timeout=120)
        times.append(time.perf_counter() - began)
    return min(times)


def one_round(case: RealCase) -> list[tuple[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as kept:
        starts = {
            "DeepSpeed, skips relayed": Start(case=case),
            "pulse, nothing kept, no search": Start(case=case, kept=f"{kept}/0", pulse={"solver_seconds": 0}),
            "pulse, nothing kept": Start(case=case, kept=f"{kept}/1"),
            "pulse, all kept": Start(case=case, kept=f"{kept}/1"),
        }
        return [(name, launch(run, case.ranks, start)) for name, start in starts.items()]


def run(start: Start) -> dict[str, float]:
    """On every rank: seconds from the process group on, of the slowest rank."""
    deepspeed.init_distributed("gloo")
    layers = len(start.case.relaying())  # builds a model, so it comes before the start, of both
    torch.distributed.barrier()
    seconds, step = timed(lambda: theirs(start, layers) if start.kept is None else ours(start))
    first, _ = timed(step)
    later = statistics.median(timed(step)[0] for _ in range(STEPS))
    return {"start": seconds, "first step": first, "later step": later}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = call()
    took = torch.tensor(time.perf_counter() - began)
    torch.distributed.all_reduce(took, torch.distributed.ReduceOp.MAX)
    return float(took), found


def theirs(start: Start, layers: int) -> Callable[[], None]:
    """Cut into equal numbers of layers."""
    ranks = start.case.ranks
    boundaries = [layers * stage // ranks for stage in range(ranks + 1)]
    return relayed.build(start.case, boundaries=boundaries, dualpipev=False, joined=True)


def ours(start: Start) -> Callable[[], None]:
    case = start.case
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "pulse": {"plan_cache": start.kept, **start.pulse},
    }
    batch = case.named_batch()
    model = PipelineModule(
        layers=case.named(),
        num_stages=case.ranks,
        loss_fn=torch.nn.functional.mse_loss,
        config=config,
        example_batch=batch,
    )
    optimizer = Resting(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = itertools.repeat(batch)
    return lambda: engine.train_batch(data)


# -- words ------------------------------------------------------------------------------------


def conditions(options: argparse.Namespace) -> str:
    return f"{options.ranks} ranks, medians of {options.rounds} starts; torch {torch.__version__}.\n"


def imports_line(imports: list[float]) -> str:
    theirs, ours = imports
    times = f"{ours / theirs:.2f} times"
    return f"Importing DeepSpeed takes {theirs:.1f} s, with this project's engine {ours:.1f} s ({times})."


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    names = ("start", "first step", "later step")
    lines = ["| | " + " | ".join(f"{name}, s" for name in names) + " |", "|---|---|---|---|"]
    for title, found in rows.items():
        medians = [statistics.median(figures[name] for figures in found) for name in names]
        lines.append(f"| {title} | " + " | ".join(f"{value:.2f}" for value in medians) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
