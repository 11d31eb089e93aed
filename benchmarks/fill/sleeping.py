"""Frozen work in idle time on real ranks: layers that sleep, real messages. Usage: python benchmarks/fill/sleeping.py

Three sides in one run, 4 ranks and 4 microbatches, frozen work 40 % of the model's: filled; the same pipeline with its
encoders before every step, a microbatch a rank; and DeepSpeed's 1F1B behind the same. Ends with status 1 when the
filled step is more than 5 % off its plan or less than 1.2 times faster than encoding up front.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from ranks import Sleeper, launch
from resting import Resting

LAYERS, FORWARD_MS, BACKWARD_MS = 16, 10.0, 20.0
FROZEN_LAYERS, FROZEN_MS = 16, 12.0
"""192 ms a microbatch beside 480 ms."""
HIDDEN = 64 * 1024
OFF, FASTER = 0.05, 1.2
SIDES = ("filled", "up front", "1F1B, up front")


class FrozenSleeper(torch.nn.Module):
    """A layer without weights or backward."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        return hidden + 1


def main() -> int:
    options = parse()
    found = launch(run_rank, options.ranks, options, timeout=400.0)
    return report(found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each side, after two to warm up")
    parser.add_argument("--quick", action="store_true", help="two measured steps, one second of solver")
    return parser.parse_args()


def run_rank(options: argparse.Namespace) -> dict[str, Any]:
    return {side: measured(side, options) for side in SIDES}


def measured(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of one side; ``planned_ms`` is its plan's makespan."""
    engine = make_engine(side, options)
    data = (batch(side) for _ in itertools.count())
    if side == "up front":
        # The engine encodes before a step what was not encoded during the one before.
        engine._ahead.start = lambda *_: frozenset()
    share_s = FROZEN_LAYERS * FROZEN_MS * options.microbatches / options.ranks / 1e3
    steps, makespans = [], []
    for _ in range(2 + (2 if options.quick else options.steps)):
        start = time.perf_counter()
        if side == "1F1B, up front":
            time.sleep(share_s)
        engine.train_batch(data)
        steps.append((time.perf_counter() - start) * 1e3)
        timeline = engine.pulse_timeline() if side != "1F1B, up front" else None
        if timeline is not None:
            makespans.append(timeline.makespan_ms)
    plan = engine.module.plan
    engine.destroy()
    return {
        "step_ms": statistics.median(steps[2:]),
        "makespan_ms": statistics.median(makespans[2:]) if makespans else None,
        "planned_ms": plan.estimate.makespan_ms if side == "filled" else None,
        "idle": plan.estimate.bubble_ratio if side == "filled" else None,
    }


def make_engine(side: str, options: argparse.Namespace) -> Any:
    import deepspeed

    from deepspeed_pulse import FrozenSpec, LayerSpec, PipelineModule

    pulse = {"placement": "wave", "solver_seconds": 1 if options.quick else 10}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": False if side == "1F1B, up front" else pulse,
    }
    frozen = FrozenSpec([FrozenSleeper(FROZEN_MS) for _ in range(FROZEN_LAYERS)], input="pixels")
    module = PipelineModule(
        layers=[LayerSpec(Sleeper, FORWARD_MS, BACKWARD_MS) for _ in range(LAYERS)],
        num_stages=options.ranks,
        loss_fn=torch.nn.functional.mse_loss,
        config=config,
        input="latents",
        example_batch=batch(side),
        frozen=None if side == "1F1B, up front" else {"latents": frozen},
    )
    optimizer = Resting(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def batch(side: str) -> Any:
    name = "latents" if side == "1F1B, up front" else "pixels"
    return {name: torch.zeros(1, HIDDEN)}, torch.zeros(1, HIDDEN)


def report(found: dict[str, dict[str, Any]]) -> int:
    filled, up_front = found["filled"], found["up front"]
    print("| side | step ms | planned ms |\n|---|---|---|")
    for side, figures in found.items():
        planned = "" if figures["planned_ms"] is None else f"{figures['planned_ms']:.0f}"
        print(f"| {side} | {figures['step_ms']:.0f} | {planned} |")
    off = filled["makespan_ms"] / filled["planned_ms"] - 1
    faster = up_front["step_ms"] / filled["step_ms"]
    stock = found["1F1B, up front"]["step_ms"] / filled["step_ms"]
    print(
        f"\nfilled: measured makespan {filled['makespan_ms']:.0f} ms, {100 * off:+.1f} % of the plan; planned idle "
        f"{100 * filled['idle']:.1f} %; {faster:.2f} times faster than encoding up front, {stock:.2f} times "
        "than 1F1B with it"
    )
    missed = [f"{100 * off:+.1f} % of the plan"] * (abs(off) > OFF) + [f"{faster:.2f} < {FASTER}"] * (faster < FASTER)
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
