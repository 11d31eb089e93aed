"""Does a step take the time and the memory that was predicted before it ran?

    python benchmarks/prediction/run.py --write     # everything: about 4 minutes on 2 quiet cores
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
import torch
from cases import CASES, MODELS, Case
from ranks import launch

README = Path(__file__).with_name("README.md")
MARK = "<!-- table: everything below is written by run.py -->"
WARM_UP = 2
WITHIN = (0.9, 1.1)
"""Predicted over measured, of the step and of the memory."""


def main() -> int:
    options = _options()
    began = time.perf_counter()
    rows = []
    for case in [CASES[i] for i in options.only or range(len(CASES))]:
        rows.append((case, launch(train, case.world, (case, options.steps), timeout=180)))
        print("| " + " | ".join(cells(*rows[-1])) + " |", flush=True)
        if options.why:
            print("  " + ", ".join(f"{name} {ms:.1f}" for name, ms in rows[-1][1]["difference"].items()), flush=True)
    minutes = (time.perf_counter() - began) / 60
    missed = [problem for case, found in rows for problem in misses(case, found)]
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
    peaks = engine.module.gather_to_first(engine.pulse_stats()["peak_live_bytes"])
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
        "lowest_ms": min(taken[WARM_UP:]),
        "highest_ms": max(taken[WARM_UP:]),
        "planned_bytes": list(module.plan.estimate.peak_bytes),
        "counted_bytes": peaks,
        "difference": {
            name: getattr(parts, name)
            for name in ("layers_ms", "pauses_ms", "messages_ms", "outside_ms", "mean_pause_ms")
        },
    }


COLUMNS = ("model", "P", "G", "M", "placement", "ZeRO", "predicted", "measured (range)", "ratio", "memory, worst rank")


def cells(case: Case, found: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    return (
        case.model,
        str(case.pipeline_ranks),
        str(case.data_parallel),
        str(case.microbatches),
        case.placement if case.pipeline_ranks > 1 else "",
        str(case.zero_stage),
        f"{found['predicted_ms']:.0f} ms",
        f"{found['measured_ms']:.0f} ms ({found['lowest_ms']:.0f} to {found['highest_ms']:.0f})",
        f"{found['predicted_ms'] / found['measured_ms']:.3f}",
        f"{_memory(found):.3f}",
    )


def _memory(found: dict[str, Any]) -> float:
    """Planned over counted, of the rank where it is farthest from 1."""
    pairs = zip(found["planned_bytes"], found["counted_bytes"], strict=True)
    return max((planned / counted for planned, counted in pairs), key=lambda ratio: abs(ratio - 1))


def table(rows: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(cells(*row)) + " |" for row in rows), ""])


def misses(case: Case, found: dict[str, Any]) -> list[str]:
    """The promises that a row misses."""
    name = f"{case.model}, P={case.pipeline_ranks} G={case.data_parallel} M={case.microbatches} {case.placement}"
    ratios = {"step": found["predicted_ms"] / found["measured_ms"], "memory": _memory(found)}
    return [
        f"{name}: predicted {what} over measured {ratio:.3f}, not within {WITHIN[0]} to {WITHIN[1]}"
        for what, ratio in ratios.items()
        if not WITHIN[0] <= ratio <= WITHIN[1]
    ]


def _conditions(options: argparse.Namespace, minutes: float) -> str:
    return (
        f"{options.steps} measured steps after {WARM_UP}, medians; {os.cpu_count()} cores, {minutes:.1f} minutes in "
        f"all; Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
