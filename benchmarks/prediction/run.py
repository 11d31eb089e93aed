"""Does a step take the time and the memory that was predicted before it ran?

    python benchmarks/prediction/run.py --write     # everything: a quarter of an hour on 2 quiet cores
    python benchmarks/prediction/run.py --quick --only 0 9

Every configuration is run by the engine on real ranks, which measures its layer costs and plans before the first step;
what it predicted then is compared with the steps that follow. Ends with status 1 when a promise is missed, and says
which.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
import torch
from cases import CASES, MODELS, Case
from narrowing import require_rows
from ranks import launch

README = Path(__file__).with_name("README.md")
MARK = "<!-- table: everything below is written by run.py -->"
WARM_UP = 2
WITHIN = (0.9, 1.1)
"""Predicted over measured, of the step and of the memory."""

RUNS = 5
"""Of a real model, each with costs and a plan of its own: one alone tells more of the machine than of the plan."""


def main() -> int:
    options = _options()
    began = time.perf_counter()
    rows = []
    for case in [CASES[i] for i in options.only or range(len(CASES))]:
        runs = 1 if case.sleeps or options.quick else RUNS
        rows.append((case, [launch(train, case.world, (case, options.steps), timeout=180) for _ in range(runs)]))
        print("| " + " | ".join(cells(*rows[-1])) + " |", flush=True)
        if options.why:
            for found in rows[-1][1]:
                print("  " + ", ".join(f"{name} {ms:.1f}" for name, ms in found["difference"].items()), flush=True)
    minutes = (time.perf_counter() - began) / 60
    missed = [problem for case, runs in rows for problem in misses(case, runs)]
    text = "\n".join([_conditions(options, minutes), table(rows), *(f"Missed: {problem}.\n" for problem in missed)])
    print("\n" + text)
    if options.write:
        readme.write(README, text, MARK)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", metavar="N", help="rows of the table, counted from 0")
    parser.add_argument("--quick", action="store_true", help="3 measured steps instead of 9")
    parser.add_argument("--why", action="store_true", help="the parts of the difference, ms")
    options = readme.keep_option(parser, "only", "quick")
    require_rows(parser, "--only", options.only or (), len(CASES))
    options.steps = 3 if options.quick else 9
    return options


def train(arguments: tuple[Case, int]) -> dict[str, Any] | None:
    """On every rank: measure, plan, predict, run; figures on rank 0."""
    import deepspeed

    from deepspeed_pulse import PipelineModule
    from deepspeed_pulse.engine.plans.planning import difference
    from deepspeed_pulse.ir.run import MeasuredStep

    case, steps = arguments
    config = {
        "train_micro_batch_size_per_gpu": 1 if case.sleeps else 4,
        "gradient_accumulation_steps": case.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.zero_stage},
        "zero_allow_untested_optimizer": True,
        "pulse": {"placement": case.placement, "solver_seconds": 2},
    }
    deepspeed.init_distributed("gloo")
    layers, batch = MODELS[case.model]()
    module = PipelineModule(
        layers=layers,
        num_stages=case.pipeline_ranks,
        loss_fn=torch.nn.functional.mse_loss,
        config=config,
        example_batch=batch(),
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    batches = [batch() for _ in range(case.microbatches)]
    taken, timelines = [], []
    for _ in range(WARM_UP + steps):
        torch.distributed.barrier()
        start = time.perf_counter()
        engine.train_batch(iter(batches))
        took = torch.tensor((time.perf_counter() - start) * 1e3)
        torch.distributed.all_reduce(took, torch.distributed.ReduceOp.MAX)
        taken.append(float(took))
        timelines.append(engine.pulse_timeline())
    peaks = engine.module.ranks.gather_to_first(engine.pulse_stats()["peak_live_bytes"])
    if engine.global_rank != 0:
        return None
    planned = engine.module.planned
    middle = min(range(WARM_UP, len(taken)), key=lambda i: abs(taken[i] - statistics.median(taken[WARM_UP:])))
    measured = MeasuredStep(step=middle, step_ms=taken[middle], ranks=(), timeline=timelines[middle])
    parts = difference(planned, module.plan, measured)
    return {
        "schedule": module.plan.solver.name,
        "predicted_ms": module.plan.estimate.step_ms,
        "measured_ms": statistics.median(taken[WARM_UP:]),
        "planned_bytes": list(module.plan.estimate.peak_bytes),
        "counted_bytes": peaks,
        "difference": {
            name: getattr(parts, name)
            for name in ("layers_ms", "pauses_ms", "messages_ms", "outside_ms", "mean_pause_ms")
        },
    }


COLUMNS = ("model", "P", "G", "M", "placement", "ZeRO", "predicted", "measured", "ratio (range)", "memory, worst rank")


def cells(case: Case, runs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """A row of the table."""
    ratios = [_step(run) for run in runs]
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return (
        case.model,
        str(case.pipeline_ranks),
        str(case.data_parallel),
        str(case.microbatches),
        case.placement if case.pipeline_ranks > 1 else "",
        str(case.zero_stage),
        f"{statistics.median(run['predicted_ms'] for run in runs):.0f} ms",
        f"{statistics.median(run['measured_ms'] for run in runs):.0f} ms",
        f"{statistics.median(ratios):.3f}{spread}",
        f"{_farthest(map(_memory, runs)):.3f}",
    )


def _step(run: dict[str, Any]) -> float:
    return float(run["predicted_ms"] / run["measured_ms"])


def _memory(run: dict[str, Any]) -> float:
    """Planned over counted, of the rank where it is farthest from 1."""
    pairs = zip(run["planned_bytes"], run["counted_bytes"], strict=True)
    return _farthest(planned / counted for planned, counted in pairs)


def _farthest(ratios: Iterable[float]) -> float:
    """From 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def table(rows: Sequence[tuple[Case, Sequence[dict[str, Any]]]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(cells(*row)) + " |" for row in rows), ""])


def misses(case: Case, runs: Sequence[dict[str, Any]]) -> list[str]:
    """The promises that a row misses."""
    name = f"{case.model}, P={case.pipeline_ranks} G={case.data_parallel} M={case.microbatches} {case.placement}"
    ratios = {"step": statistics.median(map(_step, runs)), "memory": _farthest(map(_memory, runs))}
    return [
        f"{name}: predicted {what} over measured {ratio:.3f}, not within {WITHIN[0]} to {WITHIN[1]}"
        for what, ratio in ratios.items()
        if not WITHIN[0] <= ratio <= WITHIN[1]
    ]


def _conditions(options: argparse.Namespace, minutes: float) -> str:
    return (
        f"{options.steps} measured steps after {WARM_UP}, medians; of real models {RUNS} runs; {os.cpu_count()} cores, "
        f"{minutes:.1f} minutes in all; Python {platform.python_version()}, torch {torch.__version__}, "
        f"{platform.machine()}.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
