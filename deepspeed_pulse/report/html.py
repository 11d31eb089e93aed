"""A timeline as one self-contained page: wheel zooms in time, dragging moves, hovering names the action.

Nothing is loaded from elsewhere, so the file can be sent and opened anywhere. ``tests/report/test_page.py`` opens it in
a browser.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.timeline import Timeline
from deepspeed_pulse.report.spans import FROZEN, backbone, kind, kinds, named_backbones
from deepspeed_pulse.report.words import summary


def write_page(
    path: str | Path, rows: Sequence[tuple[str, Timeline]], placement: Placement, *, backbones: Sequence[str] = ()
) -> None:
    """Write named timelines above each other, on one time axis; ``backbones``: their names, where there are several."""
    data = [_row(title, timeline, placement) for title, timeline in rows]
    owners = named_backbones(placement, backbones)
    title = "; ".join(title for title, _ in rows if title) or "timeline"
    found = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    used = {kind.letter for kind in kinds([timeline for _, timeline in rows], placement)}
    page = _PAGE.replace("@SPLIT@", (_SPLIT if "W" in used else "") + "".join(_MORE[x] for x in _MORE if x in used))
    names = json.dumps(list(backbones) or owners).replace("<", "\\u003c")
    page = page.replace("@OWNERS@", _legend_of(owners)).replace("@NAMES@", names)
    page = page.replace("@TITLE@", html.escape(title)).replace("@DATA@", found)
    Path(path).write_text(page, encoding="utf-8")


def _legend_of(owners: Sequence[str]) -> str:
    """Each of several backbones with the bar at the head of its boxes."""
    return "".join(
        f'<br><b style="border-top:5px solid {_HEADS[index % len(_HEADS)]}">&nbsp;</b>{html.escape(name)}'
        for index, name in enumerate(owners)
    )


def _row(title: str, timeline: Timeline, placement: Placement) -> dict[str, Any]:
    """``spans``: rank, letter, second stage or not, start, end, text, microbatch, backbone; ``messages``: ranks, from,
    until."""
    start = timeline.start_ms

    def at(ms: float) -> float:
        return round(ms - start, 4)

    return {
        "title": f"{title}: {summary(timeline)}" if title else summary(timeline),
        "lanes": [f"rank {r}: {', '.join(map(str, placement.stages_of(r)))}" for r in range(timeline.num_ranks)],
        "end": timeline.makespan_ms,
        "spans": [
            [s.rank, *kind(s, placement), at(s.start_ms), at(s.end_ms), str(s.work), s.work.microbatch]
            + ([] if backbone(s, placement) is None else [backbone(s, placement)])
            for s in timeline.every_span
        ],
        "messages": [[t.source_rank, t.target_rank, at(t.leave_ms), at(t.arrive_ms)] for t in timeline.every_transfer],
    }


_HEADS = ("#dddddd", "#1a1a1a", "#f2a900", "#9a5fc0")
"""Bars of backbones, of different brightness, so that they differ in grey."""

_SPLIT = """Backward is split: dark colours are its input gradients (I),
<b style="background:#8d8d8d;color:#fff">W</b>weight gradient, first
<b style="background:#6f6f6f;color:#fff">W</b>weight gradient, second."""

_MORE = {
    "E": """ <b style="background:#d6cbee">E</b>extra forward, without gradient.""",
    FROZEN: f""" <b style="background:#f6d58e">{FROZEN}</b>frozen, for the next step.""",
}
"""By letter, what the legend says where it is used."""

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>@TITLE@</title>
<style>
body { font: 13px sans-serif; margin: 12px; color: #222; background: #fff }
canvas { display: block; width: 100%; cursor: grab } canvas:active { cursor: grabbing }
#tip { height: 1.4em; color: #555 } b { padding: 0 .5em; margin-right: .3em }
</style>
<div id="tip"></div><canvas></canvas>
<p>Text: stage, operation, microbatch; where it is narrow the microbatch alone. A lane: a rank and its stages.
Red lines: messages.<br><b style="background:#cfe3f7">F</b>forward, first stage of the rank
<b style="background:#bfe8d2">F</b>forward, second (bar below)
<b style="background:#2f6db0;color:#fff">B</b>backward, first
<b style="background:#1f7f4f;color:#fff">B</b>backward, second. @SPLIT@
Wheel: zoom. Drag: move. Double click: all of it.@OWNERS@</p>
<script>
"use strict";
const names = @NAMES@, HEADS = ["#dddddd", "#1a1a1a", "#f2a900", "#9a5fc0"];
const rows = @DATA@, LANE = 26, TITLE = 24, LEFT = 96, GAP = 14;
const DARK = ["#2f6db0", "#1f7f4f"], FACE = {F: ["#cfe3f7", "#bfe8d2"], B: DARK, I: DARK, W: ["#8d8d8d", "#6f6f6f"],
  E: ["#e9e3f5", "#d6cbee"], Z: ["#f6d58e", "#f6d58e"]};
const canvas = document.querySelector("canvas"), tip = document.querySelector("#tip"), pen = canvas.getContext("2d");
const end = Math.max(...rows.map(r => r.end)) || 1;
const tall = rows.reduce((y, r) => y + TITLE + r.lanes.length * LANE + GAP, 20);
let from = 0, to = end, drag = null;
const wide = () => canvas.clientWidth - LEFT;
const x = ms => LEFT + (ms - from) / (to - from) * wide();
function draw() {
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = tall + "px";
  canvas.width = canvas.clientWidth * scale; canvas.height = tall * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "11px sans-serif"; pen.textBaseline = "middle";
  let top = 0;
  for (const row of rows) {
    pen.fillStyle = "#222"; pen.textAlign = "left"; pen.fillText(row.title, 0, top + TITLE / 2);
    row.lanes.forEach((name, r) => pen.fillText(name, 0, top + TITLE + (r + .5) * LANE, LEFT - 4));
    pen.save(); pen.beginPath(); pen.rect(LEFT, top + TITLE, wide(), row.lanes.length * LANE); pen.clip();
    for (const [rank, op, way, a, b, text, microbatch, owner] of row.spans) if (b >= from && a <= to) {
      const left = x(a), w = x(b) - left, y = top + TITLE + rank * LANE + 2;
      pen.fillStyle = FACE[op][way]; pen.fillRect(left, y, Math.max(w - .8, .3), LANE - 4);
      if (way) { pen.fillStyle = "#111"; pen.fillRect(left, y + LANE - 7, Math.max(w - .8, .3), 2.5); }
      if (owner !== undefined) {
        pen.fillStyle = HEADS[owner % HEADS.length]; pen.fillRect(left, y, Math.max(w - .8, .3), 4);
      }
      const label = w > 34 ? text : String(microbatch);
      if (w > 7 * label.length) {
        pen.fillStyle = "FEZ".includes(op) ? "#10304d" : "#fff"; pen.textAlign = "center";
        pen.fillText(label, left + w / 2, y + LANE / 2 - 2);
      }
    }
    pen.strokeStyle = "#c2452d"; pen.lineWidth = .8; pen.beginPath();
    if (row.messages.filter(m => m[3] >= from && m[2] <= to).length < 600)
      for (const [s, t, a, b] of row.messages) {
        const d = t > s ? 1 : -1, y = top + TITLE + LANE / 2;
        pen.moveTo(x(a), y + s * LANE + d * (LANE / 2 - 3)); pen.lineTo(x(b), y + t * LANE - d * (LANE / 2 - 3));
      }
    pen.stroke(); pen.restore();
    top += TITLE + row.lanes.length * LANE + GAP;
  }
  pen.fillStyle = "#555"; pen.textAlign = "center";
  const step = 10 ** Math.floor(Math.log10((to - from) / 4)), every = (to - from) / step > 16 ? 5 * step : step;
  for (let k = Math.ceil(from / every); k * every <= to; k++)
    pen.fillText(+(k * every).toPrecision(6) + " ms", x(k * every), top);
}
function limit() {
  const span = Math.min(to - from, end);
  from = Math.min(Math.max(from, 0), end - span); to = from + span; draw();
}
canvas.onwheel = e => {
  e.preventDefault();
  const at = from + (e.offsetX - LEFT) / wide() * (to - from), by = Math.exp(e.deltaY * .0015);
  if ((to - from) * by < end / 1e5) return;
  from = at - (at - from) * by; to = at + (to - at) * by; limit();
};
canvas.onmousedown = e => drag = e.offsetX;
window.onmouseup = () => drag = null;
canvas.onmousemove = e => {
  if (drag !== null) {
    const by = (drag - e.offsetX) / wide() * (to - from); drag = e.offsetX; from += by; to += by; limit();
  }
  let top = TITLE; tip.textContent = "";
  const ms = from + (e.offsetX - LEFT) / wide() * (to - from);
  for (const row of rows) {
    const rank = Math.floor((e.offsetY - top) / LANE);
    const hit = row.spans.find(s => s[0] === rank && s[3] <= ms && ms <= s[4]);
    if (hit) {
      const long = +(hit[4] - hit[3]).toPrecision(4);
      const of = hit[7] === undefined ? "" : ` of ${names[hit[7]]}`;
      tip.textContent = `${hit[5]}${of} on rank ${rank}: ${hit[3]} to ${hit[4]} ms (${long} ms)`;
    }
    top += TITLE + row.lanes.length * LANE + GAP;
  }
};
canvas.ondblclick = () => { from = 0; to = end; draw(); };
window.onresize = draw; draw();
</script></html>
"""
