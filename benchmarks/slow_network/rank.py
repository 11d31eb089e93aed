"""One rank of one side: the same steps at several link speeds, timed."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from namespaces import card_bytes, limit_card
from slow_network import layers
from slow_network.cases import Case

CLOSE = 0.03
"""A calibrated ratio is as close as this to the one asked for, in ``MOST_TRIES`` tries."""
MOST_TRIES = 5
ENOUGH_MS = 6000.0
"""What steps at one speed take together, after which no more are run: the first at a new speed are slower by some
hundredths, which is much where steps are short."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A side to run: a module of ``sides``, what its ``build`` takes, and at which speeds (Mbit/s).

    ``steps``: at most so many at each.
    """

    side: str
    case: Case
    options: Mapping[str, Any] = field(default_factory=dict)
    speeds: Mapping[str, float | None] = field(default_factory=dict)
    steps: int = 1


def measure(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Figures of every step, by speed, after two steps to warm up: the second still meets memory for the first time."""
    limit_card(None)
    step, describe = _built(job)
    step()
    step()
    found: dict[str, list[dict[str, Any]]] = {}
    for name, mbit in job.speeds.items():
        limit_card(mbit)
        steps = found[name] = [_timed(step, describe)]
        while len(steps) < job.steps and sum(one["step_ms"] for one in steps) < ENOUGH_MS:
            steps.append(_timed(step, describe))
    return found


def calibrate(job: Job) -> dict[str, dict[str, float]]:
    """The speed at which a step takes (1 + ratio) times as long as on unlimited links, for each of ``speeds``.

    ``job.speeds`` maps a name to a ratio here; None: unlimited.
    """
    limit_card(None)
    step, describe = _built(job)
    step()
    figures = [_timed(step, describe) for _ in range(3)]
    free_ms = sorted(figure["step_ms"] for figure in figures)[1]
    longest = max(figures[0]["card_bytes"])
    found = {name: {"step_ms": free_ms, "ratio": 0.0} for name, ratio in job.speeds.items() if not ratio}
    for name, ratio in job.speeds.items():
        if ratio:
            mbit = longest * 8e-3 / (ratio * free_ms)
            for _ in range(MOST_TRIES):
                limit_card(mbit)
                step_ms = _timed(step, describe)["step_ms"]
                reached = step_ms / free_ms - 1
                found[name] = {"mbit": mbit, "step_ms": step_ms, "ratio": reached}
                if abs(reached / ratio - 1) < CLOSE:
                    break
                mbit *= max(reached, 0.1 * ratio) / ratio
    return found


def profile(job: Job) -> dict[str, Any]:
    """Of the case's layers, each rank measuring a share."""
    from slow_network.sides.pulse import measured

    deepspeed.init_distributed("gloo")
    return measured(job.case)


def links(job: Job) -> dict[str, Any]:
    """Of cards without a limit, measured: a cluster."""
    from slow_network.sides.pulse import unlimited

    deepspeed.init_distributed("gloo")
    limit_card(None)
    return unlimited()


def _built(job: Job) -> tuple[Callable[[], None], Callable[[], dict[str, Any]]]:
    torch.distributed.init_process_group("gloo")
    built = importlib.import_module(f"slow_network.sides.{job.side}").build(job.case, **job.options)
    return built if isinstance(built, tuple) else (built, dict)


def _timed(step: Callable[[], None], describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Of one step: ms of the slowest rank, and of every rank the bytes it sent and the ms it slept."""
    gc.collect()
    torch.distributed.barrier()
    layers.slept_ms, sent = 0.0, card_bytes()
    start = time.perf_counter()
    step()
    took_ms = (time.perf_counter() - start) * 1e3
    torch.distributed.barrier()
    mine = {"step_ms": took_ms, "card_bytes": card_bytes() - sent, "slept_ms": layers.slept_ms, **describe()}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    figures = {key: [rank[key] for rank in gathered] for key in mine}
    return {**figures, "step_ms": max(figures["step_ms"])}
