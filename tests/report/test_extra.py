"""Extra forwards in every picture: their letter, their words, and arrows to what reads an estimate."""

from __future__ import annotations

import json
from pathlib import Path

from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.conditioning import SelfConditioned
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.planner import Job, SearchOptions, make_plan, simulate
from deepspeed_pulse.report.grid import schedule_grid
from deepspeed_pulse.report.html import write_page
from deepspeed_pulse.report.timeline import draw_timelines
from deepspeed_pulse.report.trace import write_trace

COST = {"forward_ms": 1.0, "backward_ms": 2.0, "param_bytes": 0, "activation_bytes": 1, "output_bytes": 8}
LINK = Link(bandwidth_gb_per_s=10.0, latency_us=1.0)


def test_extra_forwards_are_drawn(tmp_path: Path) -> None:
    layers = tuple(LayerCost(name=f"layer{i}", **COST) for i in range(4))
    costs = Profile(name="toy", device="cpu", dtype="float32", microbatch_size=1, layers=layers)
    cluster = Cluster(name="toy", nodes=1, ranks_per_node=2, memory_bytes=10**9, intra_node=LINK, inter_node=LINK)
    one = SelfConditioned(entry="x", layers=(0,), probability=0.5)
    job = Job(profile=costs, cluster=cluster, pipeline_ranks=2, microbatches=4, conditioning=(one,))
    plan = make_plan(job, SearchOptions(placement="linear", solver_seconds=0.0))
    timeline = simulate(plan, costs, cluster)
    text = str(schedule_grid(timeline, plan.placement))
    assert "E- extra forward, without gradient" in text and f"0E{plan.conditioning[0].microbatches[0]}" in text, text
    rows = [("planned", timeline)]
    draw_timelines(rows, plan.placement, tmp_path / "a.svg")
    write_page(tmp_path / "a.html", rows, plan.placement)
    write_trace(tmp_path / "a.json", rows, plan.placement)
    assert "extra forward, without gradient" in (tmp_path / "a.svg").read_text()
    assert "extra forward, without gradient" in (tmp_path / "a.html").read_text()
    events = json.loads((tmp_path / "a.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    arrows = [e for e in events if e.get("name") == "value:x"]
    assert [e["ph"] for e in arrows] == ["s", "f"] * 2
