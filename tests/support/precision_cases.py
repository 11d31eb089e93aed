"""Precision x ZeRO x clipping x recomputation x ranks x microbatches: all rows, or rows that hold every pair."""

from __future__ import annotations

import itertools
import random
from typing import Any

FACTORS: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "M": (1, 3, 8),
    "recompute": ("off", "on", "dropout"),
    "zero": (0, 1),
    "clip": (0.0, 0.1),
    "P": (2, 4),
    "dp": (1, 2),
}
Row = dict[str, Any]


def product() -> list[Row]:
    return [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]


def pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(row.items(), 2))


def pairwise(seed: int = 0) -> list[Row]:
    """Few rows with every pair of two factors' values: the best of many random rows, again and again."""
    rng = random.Random(seed)
    everything = product()
    missing = set().union(*map(pairs, everything))
    rows = []
    while missing:
        rng.shuffle(everything)
        best = max(everything, key=lambda row: len(pairs(row) & missing))
        rows.append(best)
        missing -= pairs(best)
    return rows


OFFLOADED: list[Row] = [
    {"precision": precision, "M": 3, "recompute": "off", "zero": 1, "clip": 0.1, "P": 2, "dp": 2, "offload": True}
    for precision in FACTORS["precision"]
]
"""Optimizer state kept on the host."""

STATIC: list[Row] = [
    {"precision": "fp16", "M": 3, "recompute": "off", "zero": zero, "clip": 0.1, "P": 2, "dp": 2, "static": 128}
    for zero in FACTORS["zero"]
]
"""A loss scale that stays."""
