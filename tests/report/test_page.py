"""The page of a timeline in a real browser: it draws, the wheel zooms, hovering names the action."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Span, Timeline
from deepspeed_pulse.report.html import write_page

BROWSER = shutil.which("chromium")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium")

ACTIONS = ("0F0", 0, 0.0), ("1F0", 1, 10.0), ("2F0", 1, 20.0), ("3F0", 0, 30.0), ("3B0", 0, 40.0), ("0B0", 0, 90.0)
LOOK = """
const box = canvas.getBoundingClientRect(), at = (ms, lane) => ({bubbles: true, cancelable: true,
  clientX: box.left + x(ms), clientY: box.top + TITLE + (lane + .5) * LANE});
const said = [];
canvas.dispatchEvent(new MouseEvent("mousemove", at(25, 1))); said.push(tip.textContent);
for (let i = 0; i < 5; i++) canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -200, ...at(5, 0)}));
said.push(from, to);
canvas.dispatchEvent(new MouseEvent("mousedown", at(from, 0)));
window.dispatchEvent(new MouseEvent("mouseup"));
canvas.dispatchEvent(new MouseEvent("dblclick")); said.push(from, to);
document.title = JSON.stringify(said);
</script></html>"""
"""What a hand would do, and what the page then says, in its title."""


def browse(page: Path, *flags: str) -> str:
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,400", *flags]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.fixture
def page(tmp_path: Path) -> Path:
    spans = [Span(rank=r, work=Action.parse(text), start_ms=s, end_ms=s + 10, waited_ms=0) for text, r, s in ACTIONS]
    write_page(tmp_path / "page.html", [("", Timeline(num_ranks=2, spans=tuple(spans)))], Placement.wave(2))
    return tmp_path / "page.html"


@needs_browser
def test_wheel_and_mouse(page: Path) -> None:
    page.write_text(page.read_text().replace("</script></html>", LOOK))
    found: list[Any] = json.loads(re.search(r"<title>(.*?)</title>", browse(page, "--dump-dom"))[1])
    hovered, start, end, *whole = found
    assert hovered == "2F0 on rank 1: 20 to 30 ms (10 ms)"
    assert 0 <= start < 5 < end < 30
    assert whole == [0, 100]


@needs_browser
def test_it_draws(page: Path) -> None:
    """Light and dark boxes, and the bar of a rank's second stage."""
    browse(page, f"--screenshot={page.with_suffix('.png')}")
    with Image.open(page.with_suffix(".png")) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    for wanted in ("cfe3f7", "bfe8d2", "2f6db0", "1f7f4f", "111111"):
        assert tuple(bytes.fromhex(wanted)) in colours, wanted
