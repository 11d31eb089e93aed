"""Two backbones of sleeping layers on real ranks: together, with steps of their own, and one after the other.

Every layer sleeps instead of computing, so ranks overlap truthfully on few cores; every message is real. Usage:
python benchmarks/backbones/sleeping.py [--write]. Ends with status 1 when a promise is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
import torch
from ranks import launch, sleepers
from resting import Resting

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- the table below is written by sleeping.py -->", "<!-- end of the measured table -->"
RANKS, FORWARD_MS, HIDDEN, STEPS = 4, 20.0, 64 * 1024, 6
GAINS = {"together": {4: 1.35, 8: 1.12}, "each": {4: 1.42, 8: 1.15}}
"""By when backbones make their steps, and microbatches: how many times as fast as one after the other, at least."""

MOST_OFF = 0.05
"""Of the planned makespan, what the measured one may be off."""

Step = dict[str, float]
"""Planned and measured ms."""


def main() -> int:
    options = _options()
    lines = [
        "| M | steps | one after the other: planned, measured ms | both: the same | measured / planned | faster |",
        "|---|---|---|---|---|---|",
    ]
    missed: list[str] = []
    for microbatches in options.microbatches:
        alone: Step = launch(run_rank, RANKS, (microbatches, None), timeout=options.timeout)
        after = {kind: 2 * ms for kind, ms in alone.items()}
        for steps in GAINS:
            both: Step = launch(run_rank, RANKS, (microbatches, steps), timeout=options.timeout)
            gain, off = after["measured"] / both["measured"], both["measured"] / both["planned"]
            lines.append(
                f"| {microbatches} | {steps} | {after['planned']:.0f}, {after['measured']:.0f} | "
                f"{both['planned']:.0f}, {both['measured']:.0f} | {off:.3f} | {gain:.2f} x |"
            )
            print(lines[-1], flush=True)
            missed += _missed(microbatches, steps, gain, off)
    if options.write:
        readme.write(README, "\n".join(lines), BEGIN, END)
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


def _missed(microbatches: int, steps: str, gain: float, off: float) -> Iterator[str]:
    least = GAINS[steps].get(microbatches, 1.0)
    if gain < least:
        yield f"M={microbatches}, {steps}: {gain:.2f} x one after the other < {least}"
    if abs(off - 1) > MOST_OFF:
        yield f"M={microbatches}, {steps}: measured / planned {off:.3f}, more than {MOST_OFF:.0%} off"


def run_rank(given: tuple[int, str | None]) -> Step | None:
    """Two backbones, which make their steps as ``given``, or one: the planned makespan, the median of measured ones.

    Steps of their own run backward in halves, which pack without gaps.
    """
    import deepspeed

    from deepspeed_pulse import Backbone, PipelineModule

    microbatches, steps = given
    together, apart = steps is not None, steps == "each"
    pulse: dict[str, Any] = {"placement": "wave", "solver_seconds": 5, "split_backward": apart}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,  # its norm is one more meeting of all ranks
        "steps_per_print": 10**9,
        "pulse": pulse | ({"backbone_steps": "each"} if apart else {}),
    }
    loss = torch.nn.functional.mse_loss

    def layers() -> Any:
        return sleepers([FORWARD_MS] * (2 * RANKS), halves=True)

    def batch() -> Any:
        one = torch.zeros(1, HIDDEN)
        part = dict.fromkeys("ab", one) if together else one
        return part, part

    model: dict[str, Any] = {"layers": layers(), "loss_fn": loss}
    if together:
        model = {"backbones": {name: Backbone(layers(), loss_fn=loss) for name in "ab"}}
    module = PipelineModule(**model, num_stages=RANKS, config=config, example_batch=batch())
    optimizer = Resting(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    data, makespans = (batch() for _ in itertools.count()), []
    for _ in range(STEPS + 2):
        start = time.perf_counter()
        engine.train_batch(data)
        timeline = engine.pulse_timeline()
        makespans.append((time.perf_counter() - start) * 1e3 if timeline is None else timeline.makespan_ms)
    if engine.global_rank != 0:
        return None
    return {"planned": engine.module.plan.estimate.makespan_ms, "measured": statistics.median(makespans[2:])}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each launch of the ranks")
    return readme.keep_option(parser, "microbatches")


if __name__ == "__main__":
    raise SystemExit(main())
