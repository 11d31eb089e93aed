"""Is the tuner's pick the fastest? Every configuration that it considers is run, on slow and on fast links.

    python benchmarks/choice/run.py --write     # everything: 6 to 9 minutes on 2 quiet cores, as root
    python benchmarks/choice/run.py --quick --only 0 5 --all

Each case is a model of sleeping layers on ranks in network namespaces with limited links. Its ranks first measure
layers and links, then the tuner chooses from what they measured, then every choice with a plan is run. Ends with status
1 when a pick is more than 3 % slower than the fastest, and says which.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import readme
import torch
from cases import CASES, Case
from namespaces import LEAST_BURST_BYTES, namespaces
from narrowing import require_rows
from ranks import launch
from resting import Resting

from deepspeed_pulse.ir.choice import Choice, Trial
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.report.tuning import describe

README = Path(__file__).with_name("README.md")
MARK = "<!-- tables: everything below is written by run.py -->"
SIZES = (1, 2)
"""Microbatch sizes that are profiled."""

SOLVER_SECONDS = 3.0
"""For better orders of the best choices; the others keep the best known schedule."""

WITHIN = 1.03
WARM_UP = 1
HOPELESS = 1.25
"""A choice whose first measured step takes so many times the fastest so far is not run longer."""

AGAIN = 1.1
"""What is within this of the fastest, and the pick, is run once more, all in turn, before they are compared."""

_CLONE_NEWUTS = 0x04000000


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks of a case run: choices with their plans, as JSON values; which the pick is; steps to measure."""

    case: Case
    choices: list[dict[str, Any]]
    plans: list[str]
    pick: int
    steps: int


def main() -> int:
    options = _options()
    began = time.perf_counter()
    rows = []
    for case in [CASES[i] for i in options.only or range(len(CASES))]:
        row = _try(case, options.steps)
        rows.append(row)
        print("| " + " | ".join(_cells(row)) + " |", flush=True)
        if options.all:
            print(_all_choices(row), flush=True)
    minutes = (time.perf_counter() - began) / 60
    missed = [
        f"Missed: {r['case'].name}: the pick takes {r['ratio']:.3f} times the fastest.\n"
        for r in rows
        if r["ratio"] > WITHIN
    ]
    text = "\n".join([_conditions(options, minutes), _table(rows), *missed, *map(_all_choices, rows)])
    print("\n" + text if not options.all else "\n".join(["", _table(rows), *missed]))
    if options.write:
        readme.write(README, text, MARK)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", metavar="N", help="cases, counted from 0")
    parser.add_argument("--quick", action="store_true", help="2 measured steps instead of 3")
    parser.add_argument("--all", action="store_true", help="every choice at once, not at the end")
    options = readme.keep_option(parser, "only", "quick")
    require_rows(parser, "--only", options.only or (), len(CASES))
    options.steps = 2 if options.quick else 3
    return options


# -- one case ---------------------------------------------------------------------------------


def _try(case: Case, steps: int) -> dict[str, Any]:
    """Measure, choose, run everything."""
    with namespaces(case.world, case.mbit, burst_bytes=LEAST_BURST_BYTES) as homes:
        measured = launch(measure, case.world, case, namespaces=homes, timeout=120)
        tried = launch(choose, 1, (case, measured), timeout=120)
        task = Task(case=case, choices=tried["choices"], plans=tried["plans"], pick=tried["pick"], steps=steps)
        step_ms = launch(run_all, case.world, task, namespaces=homes, timeout=420)
    fastest = min(range(len(step_ms)), key=lambda i: step_ms[i])
    names = [describe(_choice(row)) for row in tried["choices"]]
    return {
        "case": case,
        "links": Cluster.from_json(measured["cluster"]),
        "choices": list(zip(names, tried["predicted_ms"], step_ms, strict=True)),
        "pick": tried["pick"],
        "fastest": fastest,
        "ratio": step_ms[tried["pick"]] / step_ms[fastest],
        "without_plan": tried["without_plan"],
    }


def measure(case: Case) -> dict[str, Any]:
    """On every rank: layer costs at each microbatch size, and links."""
    import deepspeed
    from measured import measured_profiles

    from deepspeed_pulse.engine.plans.machines import machines

    _name_host(case)
    deepspeed.init_distributed("gloo")
    profiles = measured_profiles(case.name, case.layers(), case.batch(1)()[0], SIZES)
    cluster = machines(torch.device("cpu"))
    return {"profiles": [profile.to_json() for profile in profiles], "cluster": cluster.to_json()}


def _name_host(case: Case) -> None:
    """As if nodes were machines: links are measured inside and between them."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "cannot leave the host's name")
    socket.sethostname(f"node{int(os.environ['RANK']) // case.ranks_per_node}")


def choose(arguments: tuple[Case, dict[str, Any]]) -> dict[str, Any]:
    """The tuner's pick, and everything it considers, each with its plan."""
    from deepspeed_pulse.planner import OpenJob, tune

    case, measured = arguments
    profiles = [Profile.from_json(text) for text in measured["profiles"]]
    cluster = Cluster.from_json(measured["cluster"])
    job = OpenJob(profiles=profiles, cluster=cluster, global_batch=case.global_batch)
    found = tune(job, solver_seconds=SOLVER_SECONDS)
    every = tune(job, exhaustive=True, solver_seconds=0.0)
    searched = {trial.choice: trial for trial in found.ranked}  # of several contenders, not of the pick alone
    trials = [searched.get(trial.choice, trial) for trial in every.ranked]
    return {
        "choices": [_as_json(trial) for trial in trials],
        "plans": [trial.planned.to_json() for trial in trials],
        "predicted_ms": [_predicted_ms(trial) for trial in trials],
        "pick": trials.index(found.best),
        "without_plan": sorted({trial.verdict.value for trial in every.rejected}),
    }


def _as_json(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial.choice), "layout": trial.choice.layout.value}


def _choice(row: dict[str, Any]) -> Choice:
    return Choice(**{**row, "layout": Layout(row["layout"])})


def _predicted_ms(trial: Trial) -> float:
    assert trial.planned.estimate is not None
    return trial.planned.estimate.step_ms


def run_all(task: Task) -> list[float]:
    """On every rank: the median step of each choice, ms."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    taken: list[list[float]] = []
    for choice, plan in zip(map(_choice, task.choices), task.plans, strict=True):
        best = min((statistics.median(found) for found in taken), default=float("inf"))
        taken.append(_steps(task, choice, plan, hopeless_ms=HOPELESS * best))
    best = min(statistics.median(found) for found in taken)
    near = [i for i, found in enumerate(taken) if i == task.pick or statistics.median(found) <= AGAIN * best]
    for i in near if len(near) > 1 else []:
        taken[i] += _steps(task, _choice(task.choices[i]), task.plans[i], hopeless_ms=float("inf"))
    return [statistics.median(found) for found in taken]


def _steps(task: Task, choice: Choice, plan: str, *, hopeless_ms: float) -> list[float]:
    """ms of measured steps, the slowest rank's."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(plan)
        file.flush()
        config = {
            "train_micro_batch_size_per_gpu": choice.microbatch_size,
            "gradient_accumulation_steps": choice.microbatches,
            "zero_optimization": {"stage": choice.zero_stage},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "pulse": {"plan": file.name},
        }
        module = PipelineModule(
            layers=task.case.layers(),
            num_stages=choice.pipeline_ranks,
            loss_fn=torch.nn.functional.mse_loss,
            config=config,
        )
    optimizer = Resting(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    data = (batch() for batch in itertools.repeat(task.case.batch(choice.microbatch_size)))
    found: list[float] = []
    for _ in range(WARM_UP + task.steps):
        torch.distributed.barrier()
        start = time.perf_counter()
        engine.train_batch(data)
        took = torch.tensor((time.perf_counter() - start) * 1e3)
        torch.distributed.all_reduce(took, torch.distributed.ReduceOp.MAX)
        found.append(float(took))
        if len(found) == WARM_UP + 1 and found[-1] > hopeless_ms:
            break
    return found[WARM_UP:]


# -- tables -----------------------------------------------------------------------------------

COLUMNS = ("case", "ranks", "links, Gbit/s", "choices run", "pick", "fastest", "pick / fastest")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name, _, step_ms = row["choices"][row["pick"]]
    best, _, best_ms = row["choices"][row["fastest"]]
    links = row["links"]
    speeds = [link.bandwidth_gb_per_s * 8 for link in (links.intra_node, links.inter_node)]
    return (
        row["case"].name,
        str(row["case"].world),
        f"{speeds[0]:.2g}" if links.nodes == 1 else f"{speeds[0]:.2g} and {speeds[1]:.2g}",
        str(len(row["choices"])),
        f"{name}: {step_ms:.0f} ms",
        "the same" if row["pick"] == row["fastest"] else f"{best}: {best_ms:.0f} ms",
        f"{row['ratio']:.3f}",
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows), ""])


def _all_choices(row: dict[str, Any]) -> str:
    lines = [f"{row['case'].name} (without a plan: {', '.join(row['without_plan']) or 'none'}):", ""]
    lines += ["| choice | predicted | measured | predicted / measured |", "|---|---|---|---|"]
    for name, predicted, step_ms in sorted(row["choices"], key=lambda choice: choice[2]):
        lines.append(f"| {name} | {predicted:.0f} ms | {step_ms:.0f} ms | {predicted / step_ms:.2f} |")
    return "\n".join([*lines, ""])


def _conditions(options: argparse.Namespace, minutes: float) -> str:
    return (
        f"{options.steps} measured steps of a choice after {WARM_UP}, medians; what is within {AGAIN:g} times the "
        f"fastest twice; {os.cpu_count()} cores, {minutes:.1f} minutes in all; Python {platform.python_version()}, "
        f"torch {torch.__version__}, {platform.machine()}.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
