"""The pictures that train.py leaves in its output folder."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from data import Photographs
from sample import load_pipeline

from deepspeed_pulse.report.timeline import draw_timelines


def draw_loss(table: Path, picture: Path) -> None:
    """Loss of every step, and its running mean, from the CSV that training writes."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps, losses = [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]
    window = max(1, len(losses) // 25)
    means = [sum(losses[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, means, color="tab:blue", label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="mean squared error", yscale="log", title="Training loss")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def draw_samples(out: Path, photographs: Photographs, picture: Path, *, count: int = 5) -> None:
    """Real crops (left) beside images sampled from the exported folder (right), one row a class."""
    names = photographs.names
    images = load_pipeline(out)([label for label in range(len(names)) for _ in range(count)]).images
    generator = torch.Generator().manual_seed(0)
    figure, grid = plt.subplots(
        len(names), 2 * count + 1, figsize=(2 * count + 1.4, len(names) + 0.5), squeeze=False, layout="constrained"
    )
    for label, row in enumerate(grid):
        for axes in row:
            axes.axis("off")
        for column in range(count):
            crop = photographs.crop(label, generator)
            row[column].imshow(((crop + 1) / 2).permute(1, 2, 0).numpy())
            row[count + 1 + column].imshow(images[label * count + column])
        row[0].text(-0.15, 0.5, names[label], transform=row[0].transAxes, rotation=90, ha="right", va="center")
    grid[0][count // 2].set_title("crops of the photograph")
    grid[0][count + 1 + count // 2].set_title("sampled")
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def draw_timeline(engine: Any, picture: Path) -> None:
    """The planned step above the last one as it ran. All ranks call; the first one draws."""
    if not hasattr(engine, "pulse_timeline"):  # pulse is off
        return
    measured = engine.pulse_timeline()
    if engine.global_rank == 0 and measured is not None:
        planned = engine.pulse_planned_timeline()
        rows = [("planned", planned)] if planned is not None else []
        draw_timelines([*rows, ("measured, last step", measured)], engine.module.plan.placement, picture)
