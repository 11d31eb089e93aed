"""Pictures exist, have something on them, and differ in what they must."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from deepspeed_pulse.report.html import write_page
from deepspeed_pulse.report.timeline import draw_timelines


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
    draw_timelines([("the plan", sample.timeline)], sample.plan.placement, path)
    text = path.read_text()
    assert "the plan: makespan" in text
    assert "rank 3" in text
    assert "backward, second stage of the rank" in text
    assert len(re.findall(r">7</text>", text)) == 16


def test_large_timelines_are_drawn(large: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    draw_timelines([("", large.timeline)], large.plan.placement, path)
    assert path.stat().st_size > 20_000


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
