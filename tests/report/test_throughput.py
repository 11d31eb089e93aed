"""The picture of a tuning: plans joined, others hollow, memory of every rank against the limit."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib import image
from matplotlib.axes import Axes

from deepspeed_pulse.ir.choice import Choice, Trial, Tuning, Verdict
from deepspeed_pulse.report.throughput import draw_tuning, tuning_figure

LIMIT = 10**9


def choice(ranks: int, size: int) -> Choice:
    waves = 1 if ranks > 1 else 0
    return Choice(pipeline_ranks=ranks, data_parallel=8 // ranks, waves=waves, microbatch_size=size, microbatches=4)


@pytest.fixture
def tuning(sample: Any) -> Tuning:
    """A plan for P=4, one that was run, one too slow, one without room."""
    peaks = max(sample.plan.estimate.peak_bytes)
    slow = Trial(choice=choice(2, 1), verdict=Verdict.SLOW, samples_per_second=70.0)
    large = Trial(choice=choice(1, 2), verdict=Verdict.MEMORY, needed_bytes=9 * LIMIT)
    trials = [
        Trial(
            choice=choice(4, size),
            verdict=Verdict.PLANNED,
            plan=sample.plan,
            samples_per_second=rate,
            needed_bytes=peaks,
            measured=measured,
        )
        for size, rate, measured in ((2, 100.0, 95.0), (1, 80.0, None))
    ]
    return Tuning(trials=(*trials, slow, large), memory_bytes=LIMIT, profiles={2: sample.profile})


def points(axes: Axes, marker: str) -> list[tuple[float, float, bool]]:
    """Rounded P, height and whether it is filled, of one microbatch size."""
    return [
        (round(x), y, line.get_markerfacecolor() != "none")
        for line in axes.lines
        if line.get_marker() == marker and line.get_markersize() < 10
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def test_points_of_plans_are_filled_and_others_hollow(tuning: Tuning) -> None:
    rates, memory, _ = tuning_figure(tuning).axes
    assert points(rates, "o") == [(4, 80.0, True), (2, 70.0, False)]
    assert points(rates, "s") == [(4, 100.0, True)]
    assert points(rates, "x") == [(4, 95.0, True)], "what was measured"
    peak = (tuning.best.needed_bytes or 0) / 1e9
    assert points(memory, "s") == [(4, peak, True), (1, 2.0, False)], "what is far beyond the limit stays in sight"
    assert [text.get_text() for text in memory.texts] == ["9", "limit"]


def test_every_rank_of_the_best_stands_against_the_limit(tuning: Tuning, sample: Any, tmp_path: Any) -> None:
    figure = tuning_figure(tuning)
    ranks = figure.axes[2]
    assert [bar.get_height() for bar in ranks.patches] == [peak / 1e9 for peak in sample.plan.estimate.peak_bytes]
    assert ranks.lines[0].get_ydata()[0] == LIMIT / 1e9 < ranks.get_ylim()[1]
    assert "P=4 G=2 wave" in ranks.get_title()
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [
        *("microbatches of 1", "microbatches of 2", "best", "no plan: at most, or needed"),
        *("number: GB beyond the axis", "measured"),
    ]
    draw_tuning(tuning, tmp_path / "tuning.png")
    assert image.imread(tmp_path / "tuning.png").shape[1] > 1500
