"""What runs on ranks, as every picture draws it: actions and frozen work alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from deepspeed_pulse.ir.fill import FrozenRun
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.timeline import AnySpan, Timeline

FROZEN = "Z"
"""The letter of frozen work, beside those of operations."""

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "E": "extra forward, without gradient",
    FROZEN: "frozen, for the next step",
}
"""By letter, in the order of legends."""

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""matplotlib's settings for every picture."""


class Kind(NamedTuple):
    """``way``: 0 for a rank's first, third, ... stage (down the V) and for frozen work, 1 for its second (up); of
    several backbones, each one's own."""

    letter: str
    way: int


def kind(span: AnySpan, placement: Placement) -> Kind:
    if isinstance(span.work, FrozenRun):
        return Kind(FROZEN, 0)
    stages = placement.stages_of(span.rank)
    if len(placement.starts) > 1:
        stages = tuple(s for s in stages if placement.backbone_of(s) == placement.backbone_of(span.work.stage))
    return Kind(span.work.op.value, stages.index(span.work.stage) % 2)


def backbone(span: AnySpan, placement: Placement) -> int | None:
    """Index of the backbone whose work it is; None for frozen work, and where there is one."""
    if isinstance(span.work, FrozenRun) or len(placement.starts) == 1:
        return None
    return placement.backbone_of(span.work.stage)


def named_backbones(placement: Placement, names: Sequence[str]) -> list[str]:
    """``base (stages 0-7)`` of each; nothing where there is one. Without names they are numbered."""
    if len(placement.starts) == 1:
        return []
    called = names or [f"backbone {index}" for index in range(len(placement.starts))]
    return [
        f"{name} (stages {stages[0]}-{stages[-1]})" for name, stages in zip(called, placement.backbones, strict=True)
    ]


def kinds(timelines: Sequence[Timeline], placement: Placement) -> set[Kind]:
    """Those that occur."""
    return {kind(span, placement) for timeline in timelines for span in timeline.every_span}
