"""The tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import deepspeed
import torch


def conditions(cases: Sequence[dict[str, Any]], options: argparse.Namespace, minutes: float) -> str:
    """What ran where."""
    devices = ", ".join(dict.fromkeys(case["device"] for case in cases))
    sizes = "small models" if options.small else "published sizes"
    timed = f"medians of {options.rounds} rounds of {options.steps} steps, all sides in turn"
    if not all(case["timed"] for case in cases):
        timed = "**not yet on cards**: this is the stand-in, whose times say nothing and are left out"
    versions = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}"
    return f"{options.ranks} x {devices}, {sizes}, bf16; {timed}; {versions}; {minutes:.0f} minutes."


def section(case: dict[str, Any]) -> str:
    """Of a model: parity, host waits, memory of the wave's ranks, all sides."""
    head = f"### {case['title']}, {case['microbatches']} microbatches of {case['samples']}"
    return "\n\n".join([head, *_lines(case)])


def _lines(case: dict[str, Any]) -> Iterator[str]:
    yield _parity(case)
    if "per_rank" in case:
        yield _waits(case["per_rank"])
        yield _memory(case["per_rank"])
    yield _sides(case)


def _parity(case: dict[str, Any]) -> str:
    found = case.get("parity")
    if found is None:
        why = case["unfit"].get("unpartitioned") or "a side failed"
        return f"Not compared with the unpartitioned model: {why}."
    return (
        f"Against the unpartitioned model: loss {found['loss']:.1e}, all gradients {found['gradients']:.1e}, those of "
        f"the worst of {found['layers']} layers (`{found['worst_layer']}`) {found['worst']:.1e}."
    )


def _waits(ranks: Sequence[dict[str, Any]]) -> str:
    return (
        "Host waits in a steady step: "
        + "; ".join(f"rank {index}: {_places(rank['waits'])}" for index, rank in enumerate(ranks))
        + "."
    )


def _places(waits: dict[str, int] | None) -> str:
    if waits is None:
        return "not counted"
    return ", ".join(f"{count} at `{place}`" for place, count in sorted(waits.items())) or "none"


def _memory(ranks: Sequence[dict[str, Any]]) -> str:
    def row(index: int, rank: dict[str, Any]) -> tuple[str, ...]:
        allocated, counted, planned = (rank[name] for name in ("allocated_bytes", "counted_bytes", "planned_bytes"))
        over = (_ratio(counted, allocated), _ratio(planned, allocated))
        return (str(index), _megabytes(allocated), _megabytes(counted), _megabytes(planned), *over)

    names = ("rank", "allocator's peak, MB", "counted", "planned", "counted over allocated", "planned over allocated")
    return _table(names, (row(index, rank) for index, rank in enumerate(ranks)))


def _sides(case: dict[str, Any]) -> str:
    wave = case["sides"].get("wave", {}).get("step_ms")

    def row(name: str, side: dict[str, Any]) -> tuple[str, ...]:
        step_ms, peaks = side.get("step_ms"), side["allocated_bytes"]
        spread = "-" if step_ms is None else f"{step_ms:.1f} ({side['lowest_ms']:.1f} to {side['highest_ms']:.1f})"
        fullest = _megabytes(max(peaks) if peaks else None)
        return name, spread, _ratio(step_ms, wave), _ratio(step_ms, side.get("planned_ms")), fullest

    rows = [row(name, side) for name, side in case["sides"].items()]
    without = {name: f"failed: {why}" for name, why in case["failed"].items()} | case["unfit"]
    rows += [(name, why, "", "", "") for name, why in without.items()]
    names = ("side", "step, ms (lowest to highest)", "wave faster, times", "measured over planned", "fullest rank, MB")
    return _table(names, rows)


def _megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


def _ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or not b else f"{a / b:.2f}"


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(names), *rows]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
