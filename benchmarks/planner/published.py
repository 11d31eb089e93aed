"""Published step lengths and traffic, reproduced by generators, partitioner and simulator."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from bounds import Bound
from support.published import HUNYUAN, HUNYUAN_NAMED, RELAYED, UVIT, closed_forms, relayed_mib, sent_mib


def measure() -> list[Bound]:
    return [_lengths(), _traffic()]


def _lengths() -> Bound:
    """6M+3(P-1) for a wave with M >= 1.5 P, 6M+6(P-1) for 1F1B, 6M+(P-1) for ZB-V with M >= 2P - 1."""
    wrong, count = [], 0
    for ranks in range(1, 9):
        for microbatches in range(math.ceil(1.5 * ranks), 3 * ranks + 1):
            for name, expected, found in closed_forms(ranks, microbatches):
                count += 1
                if abs(found - expected) > 1e-6:
                    wrong.append(f"{name} P={ranks} M={microbatches}: {found:g}, not {expected:g}")
    return Bound(
        promise="uniform stages: 6M+3(P-1) (wave, M >= 1.5P), 6M+6(P-1) (1F1B), 6M+(P-1) (ZB-V)",
        figure="; ".join(wrong) or f"{count} of {count}, P from 1 to 8",
        met=not wrong,
    )


def _traffic() -> Bound:
    found = [(expected, sent_mib(costs(), ranks)) for costs, ranks, expected in (*UVIT, *HUNYUAN, *HUNYUAN_NAMED)]
    found += [(expected, relayed_mib(blocks, ranks, size)) for blocks, ranks, size, expected in RELAYED]
    worst = max(abs(mib / expected - 1) for expected, mib in found)
    return Bound(
        promise="published MiB per sample (U-ViT, Hunyuan-DiT; the last two with relayed skips) within 0.5 %",
        figure=", ".join(f"{mib:.2f} ({expected:g})" for expected, mib in found) + f"; worst {100 * worst:.2f} %",
        met=worst <= 0.005,
    )
