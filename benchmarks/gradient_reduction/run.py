"""Is a step shorter when a stage's gradients are summed over replicas from its last backward on?

Four ranks, two pipelines of two, each in a network namespace of its own behind a rate-limited link (needs root and
iproute2). Layers sleep instead of computing, so that ranks overlap truthfully on few cores; every byte on the wire is
real. One engine takes both ways in turn, step by step. Usage: python benchmarks/gradient_reduction/run.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from namespaces import TBF_SHARE, namespaces
from ranks import Sleeper, launch
from resting import Resting

FORWARD_MS, BACKWARD_MS = 10.0, 20.0
LAYERS, PIPELINE_RANKS, REPLICAS = 8, 2, 2
RANKS = PIPELINE_RANKS * REPLICAS
WARM_UP = 4


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder, namespaces(RANKS, lambda a, b: arguments.mbit) as homes:
        arguments.cluster = str(Path(folder) / "cluster.json")
        Path(arguments.cluster).write_text(json.dumps(cluster_file(arguments.mbit)))
        found = launch(run_rank, RANKS, arguments, namespaces=homes)
    report(found)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=400, help="rate of the link from a rank to another")
    parser.add_argument("--stage-mb", type=float, default=4.0, help="parameters of a stage, MB")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each way")
    parser.add_argument("--out", help="write the figures as JSON")
    return parser.parse_args()


def cluster_file(mbit: int) -> dict[str, Any]:
    link = {"bandwidth_gb_per_s": TBF_SHARE * mbit / 8e3, "latency_us": 100.0}
    shape = {"nodes": RANKS, "ranks_per_node": 1, "memory_bytes": 10**12}
    return {"format": "pulse-cluster/1", "name": "namespaces", **shape, "intra_node": link, "inter_node": link}


def run_rank(arguments: argparse.Namespace) -> dict[str, Any] | None:
    import deepspeed

    from deepspeed_pulse import LayerSpec, PipelineModule

    def batch() -> Any:
        return torch.zeros(1, 1024), torch.ones(1, 1024)

    layer_bytes = int(arguments.stage_mb * 1e6 / (LAYERS // (2 * PIPELINE_RANKS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "pulse": {"placement": "wave", "solver_seconds": 5, "cluster": arguments.cluster},
    }
    module = PipelineModule(
        layers=[LayerSpec(Sleeper, FORWARD_MS, BACKWARD_MS, param_bytes=layer_bytes) for _ in range(LAYERS)],
        num_stages=PIPELINE_RANKS,
        loss_fn=torch.nn.functional.mse_loss,
        config=config,
        example_batch=batch(),
        partition_method=[2, 4, 6],
    )
    optimizer = Resting(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    data = (batch() for _ in itertools.count())
    early = engine._reduction.sums
    steps: dict[str, list[float]] = {"early": [], "at the end": []}
    makespans = []
    for number in range(2 * (arguments.steps + WARM_UP)):
        way = "at the end" if number % 2 else "early"
        engine._reduction.sums = None if number % 2 else early  # what an optimizer of DeepSpeed's would have
        torch.distributed.barrier()
        start = time.perf_counter()
        engine.train_batch(data)
        took = torch.tensor((time.perf_counter() - start) * 1e3)
        torch.distributed.all_reduce(took, torch.distributed.ReduceOp.MAX)
        timeline = engine.pulse_timeline()
        if number >= 2 * WARM_UP:
            steps[way].append(float(took))
            if timeline is not None:
                makespans.append(timeline.makespan_ms)
    return figures(engine, steps, makespans, arguments) if engine.global_rank == 0 else None


def figures(
    engine: Any, steps: dict[str, list[float]], makespans: list[float], arguments: argparse.Namespace
) -> dict[str, Any]:
    from deepspeed_pulse.ir.rules import Rules
    from deepspeed_pulse.planner import estimate

    planned = engine.module.planned
    profile = replace(planned.profile, optimizer_ms_per_gb=0.0)  # an optimizer that rests

    def under(plan: Any, *, early: bool) -> Any:
        return replace(plan, rules=Rules(reduce_early=early))

    simulated = {way: estimate(under(planned.plan, early=way == "early"), profile, planned.cluster) for way in steps}
    return {
        "mbit": arguments.mbit,
        "stage_mb": arguments.stage_mb,
        "microbatches": arguments.microbatches,
        "measured_makespan_ms": statistics.median(makespans),
        "simulated_makespan_ms": simulated["early"].makespan_ms,
        "ways": {
            way: {
                "measured_step_ms": statistics.median(found),
                "lowest_ms": min(found),
                "highest_ms": max(found),
                "simulated_step_ms": simulated[way].step_ms,
            }
            for way, found in steps.items()
        },
    }


def report(found: dict[str, Any]) -> None:
    print(
        f"{PIPELINE_RANKS} pipeline ranks x {REPLICAS} replicas, {found['microbatches']} microbatches, {LAYERS} layers "
        f"of {FORWARD_MS:g} + {BACKWARD_MS:g} ms, {found['stage_mb']:g} MB a stage, links of {found['mbit']} Mbit/s\n"
        f"makespan: {found['measured_makespan_ms']:.0f} ms, simulated {found['simulated_makespan_ms']:.0f} ms\n"
    )
    print("| reduction | measured step (lowest to highest) | simulated | measured / simulated |")
    print("|---|---|---|---|")
    for way, row in found["ways"].items():
        print(
            f"| {way} | {row['measured_step_ms']:.0f} ms ({row['lowest_ms']:.0f} to {row['highest_ms']:.0f}) | "
            f"{row['simulated_step_ms']:.0f} ms | {row['measured_step_ms'] / row['simulated_step_ms']:.3f} |"
        )
    early, late = found["ways"]["early"], found["ways"]["at the end"]
    print(
        f"\nearly / at the end: measured {early['measured_step_ms'] / late['measured_step_ms']:.3f}, simulated "
        f"{early['simulated_step_ms'] / late['simulated_step_ms']:.3f}"
    )


if __name__ == "__main__":
    main()
