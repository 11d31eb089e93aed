"""Is a step shorter when a stage's gradients are summed over replicas from its last backward on?

Four ranks, two pipelines of two, each in a network namespace of its own behind a rate-limited link (needs root and
iproute2). Layers sleep instead of computing, so that ranks overlap truthfully on few cores; every byte on the wire is
real. One engine takes both ways in turn, step by step. Usage: python benchmarks/gradient_reduction/run.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORWARD_MS, BACKWARD_MS = 10.0, 20.0
LAYERS, PIPELINE_RANKS, REPLICAS = 8, 2, 2
RANKS = PIPELINE_RANKS * REPLICAS
PORT = 29517
WARM_UP = 4
TBF_SHARE = 0.97
"""Of a link's nominal rate, what its token bucket lets through (measured with iperf3)."""


def main() -> None:
    arguments = parse()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    with tempfile.TemporaryDirectory() as folder, namespaces(arguments.mbit) as names:
        cluster, result = Path(folder) / "cluster.json", Path(folder) / "result.json"
        cluster.write_text(json.dumps(cluster_file(arguments.mbit)))
        launch(names, ["--cluster", str(cluster), "--result", str(result)])
        found = json.loads(result.read_text())
    report(found)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=400, help="rate of each rank's link")
    parser.add_argument("--stage-mb", type=float, default=4.0, help="parameters of a stage, MB")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each way")
    parser.add_argument("--out", help="write the figures as JSON")
    parser.add_argument("--cluster", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def namespaces(mbit: int) -> Iterator[list[str]]:
    """A namespace a rank, joined by a bridge in one more; all are gone afterwards, links with them."""
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run this benchmark as root")
    names = [f"pulse{os.getpid()}r{rank}" for rank in range(RANKS)]
    hub = f"pulse{os.getpid()}hub"
    try:
        run("ip", "netns", "add", hub)
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", hub, "link", "add", f"to{rank}", "type", "veth", "peer", "name", "wire", "netns", name)
            run("ip", "-n", hub, "link", "set", f"to{rank}", "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"10.91.7.{rank + 1}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "up")
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms"]
            run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *limit)
        yield names
    finally:
        for name in [*names, hub]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not there: install iproute2") from None
    except subprocess.CalledProcessError as problem:
        raise SystemExit(f"{' '.join(command)}: {problem.stderr.decode().strip()}") from None


def cluster_file(mbit: int) -> dict[str, Any]:
    link = {"bandwidth_gb_per_s": TBF_SHARE * mbit / 8e3, "latency_us": 100.0}
    shape = {"nodes": RANKS, "ranks_per_node": 1, "memory_bytes": 10**12}
    return {"format": "pulse-cluster/1", "name": "namespaces", **shape, "intra_node": link, "inter_node": link}


def launch(names: list[str], more: list[str]) -> None:
    common = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": "1", "MASTER_ADDR": "10.91.7.1"}
    common |= {"MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "wire"}
    command = [sys.executable, __file__, *sys.argv[1:], *more]
    with tempfile.TemporaryFile() as log:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env={**common, "RANK": str(rank), "LOCAL_RANK": "0"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, name in enumerate(names)
        ]
        try:
            status = [process.wait(timeout=300) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(status):
            log.seek(0)
            raise SystemExit(log.read().decode(errors="replace")[-5000:])


def run_rank(arguments: argparse.Namespace) -> None:
    import deepspeed
    import torch

    from deepspeed_pulse import LayerSpec, PipelineModule

    torch.set_num_threads(1)

    class Nap(torch.autograd.Function):
        """Sleeps forward and, longer, backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(FORWARD_MS / 1e3)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD_MS / 1e3)
            return gradient.clone()

    class Sleeper(torch.nn.Module):
        """As many parameters as asked for, all with a gradient."""

        def __init__(self) -> None:
            super().__init__()
            count = int(arguments.stage_mb * 1e6 / 4 / (LAYERS // (2 * PIPELINE_RANKS)))
            self.weight = torch.nn.Parameter(torch.zeros(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Nap.apply(x + self.weight.mean())

    def batch() -> Any:
        return torch.zeros(1, 1024), torch.ones(1, 1024)

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "pulse": {"placement": "wave", "solver_seconds": 5, "cluster": arguments.cluster},
    }
    module = PipelineModule(
        layers=[LayerSpec(Sleeper) for _ in range(LAYERS)],
        num_stages=PIPELINE_RANKS,
        loss_fn=torch.nn.functional.mse_loss,
        config=config,
        example_batch=batch(),
        partition_method=[2, 4, 6],
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    data = (batch() for _ in itertools.count())
    early = engine._reduction
    steps: dict[str, list[float]] = {"early": [], "at the end": []}
    makespans = []
    for number in range(2 * (arguments.steps + WARM_UP)):
        way = "at the end" if number % 2 else "early"
        engine._reduction = None if number % 2 else early  # what an optimizer of DeepSpeed's would have
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
    if engine.global_rank == 0:
        Path(arguments.result).write_text(json.dumps(figures(engine, steps, makespans, arguments)))


def figures(
    engine: Any, steps: dict[str, list[float]], makespans: list[float], arguments: argparse.Namespace
) -> dict[str, Any]:
    from deepspeed_pulse.planner.simulate import estimate

    planned = engine.module.planned
    simulated = {
        way: estimate(planned.plan, planned.profile, planned.cluster, reduce_early=way == "early") for way in steps
    }
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
