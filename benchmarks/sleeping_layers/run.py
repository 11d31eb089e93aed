"""Does a step take as long as the simulator says? Layers that sleep, real ranks, real messages.

Every layer sleeps instead of computing, so that ranks overlap truthfully on few cores; every byte on
the wire is real. The same run measures what a sleep really takes (it overshoots), plans with those
costs, and prints measured over simulated. Usage: python benchmarks/sleeping_layers/run.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from ranks import Sleeper, launch, sleepers
from resting import Resting

FORWARD_MS = 20.0
HIDDEN = 64 * 1024
"""Elements of the hidden state and of each skip: 256 KiB."""


def main() -> None:
    arguments = parse()
    found = launch(run_rank, arguments.ranks, arguments)
    report(found)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, help="sleeping, nested skips between mirror layers; default: two a rank")
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after two to warm up")
    parser.add_argument("--placement", default="wave", choices=("wave", "linear"))
    parser.add_argument("--out", help="write the figures as JSON")
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or 2 * arguments.ranks
    return arguments


def run_rank(arguments: argparse.Namespace) -> dict[str, Any] | None:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.microbatches,
        "steps_per_print": 10**9,
        "pulse": {"placement": arguments.placement, "solver_seconds": 5},
    }

    def batch() -> Any:
        return torch.zeros(1, HIDDEN), torch.zeros(1, HIDDEN)

    module = PipelineModule(
        layers=sleepers([FORWARD_MS] * arguments.layers),
        num_stages=arguments.ranks,
        loss_fn=torch.nn.functional.mse_loss,
        config=config,
        example_batch=batch(),
    )
    optimizer = Resting(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    data = (batch() for _ in itertools.count())
    makespans, steps = [], []
    overhead = Overhead(engine, Sleeper)
    for number in range(arguments.steps + 2):
        if number == 2:
            overhead.taken_ms.clear()
        start = time.perf_counter()
        engine.train_batch(data)
        steps.append((time.perf_counter() - start) * 1e3)
        timeline = engine.pulse_timeline()
        if timeline is not None:
            makespans.append(timeline.makespan_ms)
            overheads = gaps(timeline)
    all_overheads = engine.module.ranks.gather_to_first(overhead.taken_ms)
    if engine.global_rank != 0:
        return None
    estimate = engine.module.plan.estimate
    return {
        "ranks": arguments.ranks,
        "microbatches": arguments.microbatches,
        "layers": arguments.layers,
        "placement": arguments.placement,
        "simulated_makespan_ms": estimate.makespan_ms,
        "lower_bound_ms": estimate.lower_bound_ms,
        "measured_makespan_ms": statistics.median(makespans[2:]),
        "measured_step_ms": statistics.median(steps[2:]),
        "between_actions_ms": overheads,
        "overhead_ms": summary([x for found in all_overheads for x in found]),
        "solver": engine.module.plan.solver.name,
    }


class Overhead:
    """What the engine itself takes for each action, in ms: not in layers, not in autograd, not waiting.

    Wraps the instruction that runs actions, the layers' forward, autograd's backward and the waits for messages.
    """

    def __init__(self, engine: Any, layer_class: Any) -> None:
        from deepspeed_pulse.engine import communicator

        self.taken_ms: list[float] = []
        self._elsewhere = 0.0
        layer_class.forward = self._outside(layer_class.forward)
        torch.autograd.backward = self._outside(torch.autograd.backward)
        communicator.wait = self._outside(communicator.wait)
        engine._INSTRUCTION_MAP = {
            kind: self._timed(run) if kind.__name__ == "RunStep" else run
            for kind, run in engine._INSTRUCTION_MAP.items()
        }

    def _outside(self, run: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self._elsewhere += time.perf_counter() - start

        return timed

    def _timed(self, run: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> None:
            start, before = time.perf_counter(), self._elsewhere
            run(*args, **kwargs)
            own = time.perf_counter() - start - (self._elsewhere - before)
            self.taken_ms.append(own * 1e3)

        return timed


def summary(taken_ms: list[float]) -> dict[str, float]:
    """The median and the 90th percentile."""
    return {"median": statistics.median(taken_ms), "p90": sorted(taken_ms)[int(0.9 * len(taken_ms))]}


def gaps(timeline: Any) -> float:
    """Median time between two actions of a rank that follow each other at once, ms."""
    found = []
    for rank in range(timeline.num_ranks):
        spans = timeline.spans_of(rank)
        found += [b.start_ms - a.end_ms for a, b in itertools.pairwise(spans) if b.start_ms - a.end_ms < FORWARD_MS / 4]
    return statistics.median(found)


def report(found: dict[str, Any]) -> None:
    ratio, overhead = found["measured_makespan_ms"] / found["simulated_makespan_ms"], found["overhead_ms"]
    print(
        f"{found['ranks']} ranks, {found['microbatches']} microbatches, {found['layers']} layers of {FORWARD_MS:g} + "
        f"{2 * FORWARD_MS:g} ms, {found['placement']}, schedule {found['solver']}\n"
        f"simulated makespan {found['simulated_makespan_ms']:.1f} ms (lower bound {found['lower_bound_ms']:.1f} ms)\n"
        f"measured makespan  {found['measured_makespan_ms']:.1f} ms, step {found['measured_step_ms']:.1f} ms, "
        f"{found['between_actions_ms']:.2f} ms between actions\n"
        f"engine, per action: median {overhead['median']:.3f} ms, 90 % below {overhead['p90']:.3f} ms\n"
        f"measured / simulated makespan = {ratio:.3f}, measured step / simulated makespan = "
        f"{found['measured_step_ms'] / found['simulated_makespan_ms']:.3f}"
    )


if __name__ == "__main__":
    main()
