"""Run files: what is written is read again, and a malformed one is an error that names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.fill import Fill, Filling, FrozenLayer, FrozenPart, FrozenRun
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.run import Difference, MeasuredStep, RankFigures, RankMemory, Run, bytes_by_kind
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Span, Timeline


def span(rank: int, action: str, start: float) -> Span:
    return Span(rank=rank, work=Action.parse(action), start_ms=start, end_ms=start + 1.5, waited_ms=0.25)


def figures(sent: dict[str, int]) -> RankFigures:
    return RankFigures(
        p2p_bytes=sent, local_value_bytes=7, peak_live_bytes=100, idle_ms=0.5, peak_parts={"state": 90, "received": 10}
    )


def a_run() -> Run:
    schedule = (tuple(map(Action.parse, ("0F0", "0B0"))), tuple(map(Action.parse, ("1F0", "1B0"))))
    plan = Plan(
        pipeline_ranks=2,
        data_parallel=1,
        microbatches=1,
        microbatch_size=1,
        boundaries=(0, 1, 2),
        placement=(0, 1),
        schedule=schedule,
    )
    spans = span(0, "0F0", 0), span(0, "0B0", 6), span(1, "1F0", 2), span(1, "1B0", 4)
    timeline = Timeline(num_ranks=2, spans=spans)
    ranks = figures({"hidden": 5, "value:a": 1, "value:b": 2}), figures({"hidden_grad": 5})
    difference = Difference(
        planned_ms=6.0,
        measured_ms=8.0,
        layers_ms=3.0,
        pauses_ms=0.0,
        messages_ms=-1.5,
        outside_ms=0.5,
        stage=1,
        stage_planned_ms=1.0,
        stage_measured_ms=3.0,
        mean_pause_ms=0.0,
        memory=(RankMemory(planned={"state": 5}, measured={"state": 5, "received": 1}),) * 2,
    )
    steps = (MeasuredStep(step=3, step_ms=8.0, ranks=ranks, timeline=timeline),)
    return Run(plan=plan, layers=("a", "b"), costs="measured", planned=timeline, steps=steps, difference=difference)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    run = a_run()
    path = tmp_path / "x.run.json"
    path.write_text(run.to_json())
    assert Run.load(path) == run
    assert Run.load(path).to_json() == run.to_json()


def test_frozen_work_is_written_and_read_again() -> None:
    run = a_run()
    costs = FrozenLayer(name="a", forward_ms=1.0, param_bytes=1, output_bytes=1, activation_bytes=1)
    work = FrozenRun("text", 0, 1, 0)
    fill = Fill(
        parts=(FrozenPart(name="text", layers=(costs,), targets=(1,)),), rows=((), (Filling(2, work),)), solver="greedy"
    )
    assert run.planned is not None
    timeline = replace(run.planned, frozen=(Span(rank=1, work=work, start_ms=6.0, end_ms=7.25),))
    steps = (replace(run.steps[0], timeline=timeline),)
    filled = replace(run, plan=replace(run.plan, fill=fill), planned=timeline, steps=steps)
    assert Run.from_json(filled.to_json()) == filled
    data = json.loads(filled.to_json())
    data["steps"][0]["spans"][-1][1] = "text[1]@0>0"
    with pytest.raises(FileError, match="expected layers of a frozen part"):
        Run.from_json(json.dumps(data))


def test_bytes_add_up_by_kind() -> None:
    assert a_run().steps[0].p2p_bytes == {"hidden": 5, "hidden_grad": 5, "value": 3, "value_grad": 0}
    assert bytes_by_kind({"value_grad:x": 4})["value_grad"] == 4


def change(*keys: Any, to: Any) -> Callable[[Any], None]:
    def act(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return act


BAD: list[tuple[Callable[[Any], None], str]] = [
    (change("format", to="pulse-plan/1"), "field 'format': expected 'pulse-run/1'"),
    (change("speed", to=1), "unknown field 'speed'"),
    (change("plan", "waves", to=-1), "plan: field 'waves'"),
    (change("layers", to=["a"]), "field 'layers': expected the names of the plan's 2 layers"),
    (change("costs", to=None), "field 'costs': expected a text"),
    (change("planned", 0, to=[0, "0F0", 1]), r"planned\[0\]: expected \[rank, action"),
    (change("planned", 0, 2, to="x"), r"planned\[0\]: expected \[rank, action"),
    (change("planned", 0, 1, to="0X0"), r"planned\[0\]: "),
    (change("planned", 0, 2, to=10**400), r"planned\[0\]: expected times of at most 1e\+15 ms, .* found more, 1\.5"),
    (change("planned", 0, 4, to=-2e15), r"planned\[0\]: expected times of at most 1e\+15 ms"),
    (change("planned", 0, 3, to=-1), r"planned\[0\]: expected .* the end not before the start, found 0, -1, 0\.25"),
    (change("planned", 0, 0, to=0.0), r"planned\[0\]: expected \[rank, action"),
    (change("planned", to=[]), "field 'planned': expected at least one action"),
    (change("planned", 0, 0, to=2), r"planned\[0\]: expected \[rank, action"),
    (change("planned", 0, 1, to="1F0"), r"planned\[0\]: expected an action of rank 0"),
    (change("steps", 0, "spans", to=[]), "expected at least one action"),
    (change("steps", 0, "ranks", to=[]), "figures of each of the 2 ranks"),
    (change("steps", 0, "step_ms", to=-1), "field 'step_ms'"),
    (change("steps", 0, "ranks", 0, "p2p_bytes", to={"parcels": 1}), "field 'p2p_bytes': expected an object"),
    (change("steps", 0, "ranks", 0, "p2p_bytes", to={"hidden": True}), "field 'hidden'"),
    (change("difference", "stage", to=None), "field 'stage'"),
    (change("difference", "memory", 0, "planned", to={"luggage": 1}), "unknown field 'luggage'"),
    (change("steps", 0, "ranks", 0, "peak_parts", to={"state": -1}), "field 'state'"),
]


@pytest.mark.parametrize(("spoil", "said"), BAD)
def test_a_malformed_file_names_the_place(spoil: Callable[[Any], None], said: str) -> None:
    data = json.loads(a_run().to_json())
    spoil(data)
    with pytest.raises(FileError, match=said):
        Run.from_json(json.dumps(data), "x.json")
