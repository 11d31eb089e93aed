"""Pictures exist, have something on them, and differ in what they must."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from matplotlib.collections import LineCollection
from support.asked import asked

from deepspeed_pulse.planner import make_plan, simulate
from deepspeed_pulse.report.html import write_page
from deepspeed_pulse.report.timeline import draw_timelines, timelines_figure


def luminance(picture: np.ndarray) -> np.ndarray:
    return picture[..., :3] @ np.array([0.2126, 0.7152, 0.0722])


def test_png_has_light_forwards_and_dark_backwards(sample: Any, tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    rows = [("planned", sample.timeline), ("measured", sample.timeline)]
    draw_timelines(rows, sample.plan.placement, path, memory=True)
    grey = luminance(image.imread(path))
    assert grey.shape[0] > 500
    light, dark = ((grey > 0.7) & (grey < 0.92)).mean(), ((grey > 0.3) & (grey < 0.5)).mean()
    assert light > 0.02
    assert dark > 0.05


def test_svg_keeps_titles_and_numbers_as_text(sample: Any, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    draw_timelines([("the plan", sample.timeline)], sample.plan.placement, path, memory=True)
    text = path.read_text()
    assert "the plan: makespan" in text
    assert "rank 3" in text
    assert "backward, second stage of a rank" in text
    assert "stages 3, 4" in text and "number: its microbatch" in text
    assert "memory beside weights, gradients and optimizer state" in text
    assert len(re.findall(r">7</text>", text)) == 16


def test_the_legend_stays_inside_and_split_backwards_have_entries(sample: Any, tmp_path: Path) -> None:
    """Seven entries are more than one line of a P=4 picture holds."""
    options = {"placement": "wave", "schedule": "zbv", "split_backward": True, "solver_seconds": 0}
    plan = make_plan(*asked(sample.profile, cluster=sample.cluster, pipeline_ranks=4, microbatches=8, **options))
    timeline = simulate(plan, sample.profile, sample.cluster)
    figure = timelines_figure([("split", timeline)], plan.placement)
    figure.savefig(tmp_path / "split.png")
    (legend,) = figure.legends
    box, page = legend.get_window_extent(), figure.bbox
    assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0
    words = {text.get_text().split(",")[0] for text in legend.get_texts()}
    kinds = {"forward", "backward", "input gradient", "weight gradient"}
    assert words == {"number: its microbatch", "message"} | kinds
    for shown, there in ((timeline, True), (sample.timeline, False)):
        write_page(tmp_path / "page.html", [("", shown)], plan.placement)
        assert ("weight gradient" in (tmp_path / "page.html").read_text()) is there


def test_large_timelines_are_drawn(large: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    draw_timelines([("", large.timeline)], large.plan.placement, path)
    assert path.stat().st_size > 20_000
    figure = timelines_figure([("", large.timeline)], large.plan.placement)
    lines = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
    assert [len(c.get_segments()) for c in lines] == [len(large.timeline.transfers)], "a line a message"


def test_unknown_suffix_is_refused(sample: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="xyz"):
        draw_timelines([("", sample.timeline)], sample.plan.placement, tmp_path / "a.xyz")


def test_page_is_self_contained_and_safe(sample: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, [("</script><b>", sample.timeline)], sample.plan.placement)
    text = path.read_text()
    assert text.count("</script>") == 1
    assert "<title>&lt;/script&gt;&lt;b&gt;</title>" in text
    assert '"7B7"' in text
    assert not re.search(r"(src|href)=|https?://", text)
