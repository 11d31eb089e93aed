"""The picture of a model: every layer, every skip, cuts where the plan has them; what is sent looks different."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from support.asked import asked

from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.planner import make_plan
from deepspeed_pulse.report.model import draw_model, model_figure

UNUSUAL = "a name that is longer than $what_{fits}$ below a bar"


def profile_of(num_layers: int, skips: tuple[Skip, ...] = ()) -> Profile:
    layers = tuple(
        LayerCost(
            name=UNUSUAL if index == 1 else f"blocks.{index}",
            forward_ms=1.0 + index % 3,
            backward_ms=2.0,
            param_bytes=10**6,
            activation_bytes=index * 10**6,
            output_bytes=10**5,
        )
        for index in range(num_layers)
    )
    return Profile(name="toy", device="none", dtype="float32", microbatch_size=2, layers=layers, skips=skips)


def skips_of(axes: Axes) -> list[list[float]]:
    """Widths of the arcs that stay and of those that are sent."""
    found = [c for c in axes.collections if isinstance(c, LineCollection)]
    return [list(c.get_linewidths()) if c.get_segments() else [] for c in found]


def text_of(figure: Figure) -> str:
    ticks = [label.get_text() for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    notes = [text.get_text() for axes in figure.axes for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label)]
    legend = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return "\n".join([*ticks, *notes, *legend])


def test_a_bar_a_layer_and_an_arc_a_skip_by_its_bytes() -> None:
    skips = (*(Skip(name=f"s{i}", source=i, target=9 - i, bytes=10**i) for i in range(3)),)
    skips += tuple(Skip(name="temb", source=0, target=target, bytes=8) for target in (2, 5, 9))
    figure = model_figure(profile_of(10, skips))
    arcs, rails, times, weights, kept = figure.axes
    stay, sent = skips_of(arcs)
    assert stay == sorted(stay) and len(set(stay)) == 3 and not sent
    assert len(times.patches) == 20 and len(weights.patches) == len(kept.patches) == 10
    assert [bar.get_height() for bar in kept.patches] == list(range(10))
    assert [list(line.get_xdata()) for line in rails.lines] == [[0, 9], [0], [2, 5, 9], []]
    assert "blocks.9  9" in text_of(figure) and "temb (8e-06 MB)" in text_of(figure)


def test_spread_is_drawn_where_it_was_measured() -> None:
    profile = profile_of(4)
    assert "spread" not in text_of(model_figure(profile))
    layers = [replace(layer, spread=0.5) if i else layer for i, layer in enumerate(profile.layers)]
    figure = model_figure(replace(profile, layers=tuple(layers)))
    (spreads,) = (c for c in figure.axes[2].collections if isinstance(c, LineCollection))
    assert [segment[:, 1].tolist() for segment in spreads.get_segments()] == [[3.0, 5.0], [3.75, 6.25], [2.25, 3.75]]
    assert "spread of repeats" in text_of(figure)


def test_what_a_plan_sends_is_dashed_or_hollow(sample: Any) -> None:
    temb = tuple(Skip(name="temb", source=0, target=target, bytes=100) for target in range(1, 8))
    profile = replace(sample.profile, skips=(*sample.profile.skips, *temb))
    options = {"cluster": sample.cluster, "pipeline_ranks": 4, "microbatches": 4, "solver_seconds": 0}
    for placement in ("wave", "linear"):
        plan = make_plan(*asked(profile, placement=placement, **options))
        figure = model_figure(profile, plan=replace(plan, recompute=(2,)))
        stay, sent = skips_of(figure.axes[0])
        stays = sum(plan.rank_of_layer(s.source) == plan.rank_of_layer(s.target) for s in sample.profile.skips)
        assert stays == 4 if placement == "wave" else stays < 2
        assert (len(stay), len(sent)) == (stays, 4 - stays)
        here, away = (set(line.get_xdata()) for line in figure.axes[1].lines[2:4])
        assert here == {t for t in range(1, 8) if plan.rank_of_layer(t) == plan.rank_of_layer(0)}
        assert here | away == set(range(1, 8))
        text = text_of(figure)
        assert ("sent to another rank" in text) is (stays < 4)
        assert "read on another rank" in text and "run again in backward" in text
        assert f"rank {plan.placement[-1]}" in text
        assert len(figure.axes[2].lines) == plan.num_stages - 1, "a line at each cut"
        shades = [area.get_facecolor() for area in figure.axes[0].patches]
        ranks = plan.placement
        assert all((shades[a] == shades[b]) is (ranks[a] == ranks[b]) for a, b in combinations(range(len(ranks)), 2))


@pytest.mark.parametrize("num_layers", [1, 2, 100, 250])
def test_any_number_of_layers_is_drawn_and_named_legibly(num_layers: int, tmp_path: Path) -> None:
    """Names never overlap and stay inside; hatched dark and light bars differ in grey."""
    skips = tuple(Skip(name=f"s{i}", source=i, target=num_layers - 1 - i, bytes=1) for i in range(num_layers // 2))
    figure = model_figure(profile_of(num_layers, skips))
    figure.savefig(tmp_path / "model.png", dpi=60)
    boxes = [label.get_window_extent() for label in figure.axes[-1].get_xticklabels()]
    assert all(a.x1 <= b.x0 + 0.5 for a, b in pairwise(boxes))
    assert all(box.y0 >= figure.legends[0].get_window_extent().y1 - 1 for box in boxes)
    if num_layers == 100:
        assert len(boxes) == 100
        assert min(label.get_fontsize() for label in figure.axes[-1].get_xticklabels()) >= 6
    grey = image.imread(tmp_path / "model.png")[..., :3] @ np.array([0.2126, 0.7152, 0.0722])
    assert ((grey > 0.8) & (grey < 0.92)).mean() > 0.01 and ((grey > 0.3) & (grey < 0.5)).mean() > 0.01


def test_values_with_many_readers_beyond_the_lines_are_counted(tmp_path: Path) -> None:
    skips = tuple(
        Skip(name=f"v{v}", source=0, target=target, bytes=1000 * (v + 1)) for v in range(15) for target in (3, 5)
    )
    draw_model(profile_of(6, skips), tmp_path / "model.svg")
    text = (tmp_path / "model.svg").read_text()
    assert "and 3 more values with several readers, of 0.003 MB at most" in text
    assert "v14 (0.015 MB)" in text
    assert "than $what_{fits}$ below a bar" in text and "a name" not in text
