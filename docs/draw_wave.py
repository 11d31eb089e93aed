"""Draws docs/pictures/wave.png: one U-Net on four ranks, its skips local to their ranks or relayed through all of them.

.venv/bin/python docs/draw_wave.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from deepspeed_pulse.ir.placement import Placement

RANKS = 4
DOWN, UP, BAND = "#cfe3f7", "#bfe8d2", "#f4f4f2"
INK, HIDDEN, SKIP = "#22303c", "#a0a8b0", "#a83210"
HALF_WIDTH, HALF_HEIGHT = 0.38, 0.26


def box(axes: Axes, x: float, y: float, text: str, face: str, half_width: float = HALF_WIDTH) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - half_width, y - HALF_HEIGHT),
            2 * half_width,
            2 * HALF_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=face,
            edgecolor=INK,
            linewidth=1.1,
            zorder=3,
        )
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=10, color=INK, zorder=4)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1.6, bend: float = 0.0
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            connectionstyle=f"arc3,rad={bend}",
            color=colour,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            zorder=5,
        )
    )


def band(axes: Axes, left: float, right: float, y: float, rank: int) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, y - 0.42),
            right - left,
            0.84,
            boxstyle="round,pad=0,rounding_size=0.1",
            facecolor=BAND,
            edgecolor="none",
            zorder=0,
        )
    )
    axes.text(left - 0.12, y, f"rank {rank}", ha="right", va="center", fontsize=10, color=INK)


def draw_wave(axes: Axes) -> None:
    """The V: stage i and stage 2P-1-i on rank i, a skip is a straight line inside its rank."""
    placement = Placement.wave(RANKS)
    places = {stage: (float(stage), float(-rank)) for stage, rank in enumerate(placement)}
    for rank in range(RANKS):
        band(axes, -0.6, 2 * RANKS - 0.4, -rank, rank)
    for stage, (x, y) in places.items():
        box(axes, x, y, f"stage {stage}", DOWN if stage < RANKS else UP)
    for stage in range(2 * RANKS - 1):
        (x, y), (next_x, next_y) = places[stage], places[stage + 1]
        if y == next_y:
            arrow(axes, (x + HALF_WIDTH, y), (next_x - HALF_WIDTH, next_y), HIDDEN)
        else:
            side = HALF_HEIGHT if next_y > y else -HALF_HEIGHT
            arrow(axes, (x + 0.12, y + side), (next_x - 0.12, next_y - side), HIDDEN)
    for rank in range(RANKS):
        up = 2 * RANKS - 1 - rank
        if up - rank > 1:
            arrow(axes, (rank + HALF_WIDTH, -rank), (up - HALF_WIDTH, -rank), SKIP, 2.4)
            text = "skips stay in a buffer of the rank: 0 bytes sent" if rank == 0 else ""
            axes.text((rank + up) / 2, -rank + 0.12, text, ha="center", fontsize=9.5, color=SKIP)
    low, up = (RANKS - 1 + 0.1, -RANKS + 1 - HALF_HEIGHT), (RANKS - 0.1, -RANKS + 1 - HALF_HEIGHT)
    arrow(axes, low, up, SKIP, 2.4, bend=0.4)
    title(axes, "deepspeed_pulse: the wave", "only the hidden state crosses ranks")


def draw_relay(axes: Axes) -> None:
    """Plain 1F1B: one stage a rank, every skip is in the tuple that each rank hands on."""
    placement = Placement.linear(RANKS)
    step = 2.0
    for stage, rank in enumerate(placement):
        band(axes, -0.75, step * (RANKS - 1) + 0.9, -rank, rank)
        layers = f"stages {2 * stage}-{2 * stage + 1}"
        box(axes, step * stage, -rank, layers, DOWN if 2 * stage < RANKS else UP, 0.62)
    for stage in range(RANKS - 1):
        x, y = step * stage, -float(stage)
        lanes = 1 + carried(stage)
        for lane in range(lanes):
            begin = (x + 0.36 + 0.14 * (lane - (lanes - 1) / 2), y - HALF_HEIGHT)
            end = (begin[0] + step - 0.72, y - 1 + HALF_HEIGHT)
            arrow(axes, begin, end, SKIP if lane else HIDDEN, 2.0 if lane else 1.6)
        on_right = stage < RANKS - 2
        axes.text(
            x + step / 2 + (0.75 if on_right else -0.75),
            y - 0.36 if on_right else y - 0.62,
            f"hidden state + {carried(stage)} groups of skips",
            ha="left" if on_right else "right",
            fontsize=9.5,
            color=SKIP,
        )
    title(axes, "plain pipeline (1F1B)", "every skip is relayed through every rank between its ends")


def carried(stage: int) -> int:
    """Skip groups (8 cuts of the model, mirror pairs) alive between rank ``stage`` and the next."""
    cut = 2 * (stage + 1)
    return sum(1 for low in range(RANKS) if low < cut <= 2 * RANKS - 1 - low)


def title(axes: Axes, name: str, words: str) -> None:
    axes.set_title(name, loc="left", fontsize=13, fontweight="bold", color=INK, pad=22)
    axes.text(0, 1.015, words, transform=axes.transAxes, fontsize=10.5, color=INK, va="bottom")
    axes.set_xlim(-1.35, 2 * RANKS - 0.3)
    axes.set_ylim(-RANKS + 0.45, 0.5)
    axes.axis("off")


def main() -> None:
    with rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(15, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_wave(left)
        draw_relay(right)
        figure.savefig(Path(__file__).with_name("pictures") / "wave.png", dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
