"""The JSON Schemas that are shipped: they are the newest, and take whatever the package itself reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.cluster import Cluster, CommunicatorBytes, Link
from deepspeed_pulse.ir.codec import File
from deepspeed_pulse.ir.fill import Fill, Filling, FrozenLayer, FrozenPart, FrozenRun
from deepspeed_pulse.ir.frozen import FrozenParts, TimedLayer, TimedPart
from deepspeed_pulse.ir.json_schema import FILES, FOLDER, file_name, schema_of, text_of
from deepspeed_pulse.ir.plan import Estimate, Plan, Route, Solver
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.ir.run import MeasuredStep, RankFigures, Run
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.ir.timeline import Span, Timeline

COST = {"forward_ms": 1.0, "param_bytes": 8, "activation_bytes": 8, "output_bytes": 8}
FROZEN = FrozenPart(name="text", layers=(FrozenLayer(name="a", **COST),))
ESTIMATE = dict.fromkeys(("makespan_ms", "step_ms", "lower_bound_ms", "gap", "bubble_ratio"), 1.0)
PLAN = Plan(
    pipeline_ranks=2,
    data_parallel=1,
    microbatches=1,
    microbatch_size=1,
    boundaries=(0, 1, 2),
    placement=(0, 1),
    schedule=(tuple(map(Action.parse, ("0F0", "0B0"))), tuple(map(Action.parse, ("1F0", "1B0")))),
    routes=(Route(name="skip", source_stage=0, hops=((0, 1),)),),
    recompute=(1,),
    fill=Fill(parts=(FROZEN,), rows=((Filling(1, FrozenRun("text", 0, 1, 0)),), ())),
    estimate=Estimate(**ESTIMATE, peak_bytes=(1, 2), p2p_bytes_per_microbatch=3, samples_per_second=4.0),
    solver=Solver(name="1f1b"),
)
SPANS = Timeline(
    num_ranks=2,
    spans=tuple(
        Span(rank=rank, work=Action.parse(text), start_ms=0.0, end_ms=1.0, waited_ms=0.5)
        for rank, text in ((0, "0F0"), (1, "1F0"))
    ),
)
COUNTED = RankFigures(p2p_bytes={"value:a": 1}, local_value_bytes=1, peak_live_bytes=9, idle_ms=0.5)
EXAMPLES: tuple[File, ...] = (
    Profile(
        name="p",
        device="cpu",
        dtype="float32",
        microbatch_size=1,
        layers=(LayerCost(name="a", backward_ms=2.0, weight_grad_ms=1.0, spread=0.1, **COST),),
        skips=(Skip(name="s", source=0, target=0, bytes=4),),
    ),
    Cluster(
        name="c",
        nodes=1,
        ranks_per_node=2,
        memory_bytes=9,
        intra_node=Link(bandwidth_gb_per_s=1.0, latency_us=0.0, one_port=True),
        inter_node=Link(bandwidth_gb_per_s=1.0, latency_us=0.0, bus_gb_per_s=2.0),
        communicators=CommunicatorBytes(world_bytes=1),
    ),
    FrozenParts(
        name="f",
        device="cpu",
        dtype="float32",
        parts=(
            TimedPart(
                name="text",
                layers=(TimedLayer(name="a", forward_ms={1: 2.0}, param_bytes=1, output_bytes=1, activation_bytes=1),),
            ),
        ),
    ),
    PLAN,
    Run(
        plan=PLAN,
        layers=("a", "b"),
        costs="measured",
        planned=SPANS,
        steps=(MeasuredStep(step=3, step_ms=2.0, ranks=(COUNTED, COUNTED), timeline=SPANS),),
        difference=None,
    ),
)
WRONG: tuple[Any, ...] = (None, -1, 0, 1.5, "x", True, [], {}, [["x"]], {"x": 1})


def test_what_is_shipped_is_the_newest() -> None:
    """``python -m deepspeed_pulse.ir.json_schema`` writes it."""
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == {
        file_name(file): text_of(file) for file in FILES
    }


@pytest.mark.parametrize("file", FILES)
def test_a_schema_is_one(file: type[File]) -> None:
    Draft202012Validator.check_schema(schema_of(file))


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(data)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    if value == "gone":
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.WHAT)
def test_a_schema_takes_what_is_read_and_refuses_what_a_field_may_not_hold(example: File) -> None:
    """Every field is left out and replaced in turn. What fields say together is not for a schema."""
    data = json.loads(example.to_json())
    schema = Draft202012Validator(schema_of(type(example)))
    assert schema.is_valid(data)
    refused = told = 0
    for path in places(data):
        for value in ("gone", *WRONG):
            other = changed(data, path, value)
            try:
                type(example).from_json(json.dumps(other), "x")
            except FileError as problem:
                refused += 1
                told += not schema.is_valid(other)
                assert not schema.is_valid(other) or "missing" not in str(problem)
            else:
                assert schema.is_valid(other), (path, value, next(schema.iter_errors(other)).message)
    assert told > 0.7 * refused
    assert not schema.is_valid({**data, "unknown": 1})
