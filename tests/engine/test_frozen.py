"""Frozen parts in idle time: the same training as with encoded data; mistakes are errors that name the part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import launch_each
from support.launch import launch
from torch import nn

from deepspeed_pulse import FrozenSpec, spec
from deepspeed_pulse.engine.backbones import Head
from deepspeed_pulse.engine.frozen import DeclaredParts
from deepspeed_pulse.errors import ConfigError, GraphError
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.graph import Graph, Layer

CASES = [
    {"P": 2, "M": 2},
    {"P": 2, "M": 8},
    {"P": 4, "M": 2},
    {"P": 4, "M": 8},
    {"P": 4, "M": 2, "placement": "linear"},
]


def test_trains_as_with_encoded_data_through_evaluation_and_resume(subtests: pytest.Subtests, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "cases": CASES}
    launch_each(subtests, "support.frozen_ranks:trains", 4, CASES, arguments, timeout=250)


def test_an_iterator_that_ends() -> None:
    (_, first), (_, second) = launch("support.frozen_ranks:ends_with_its_data", 2, timeout=100)
    assert "PASSED" in first and "PASSED" in second
    before, _, after = first.partition("SO FAR NO WARNING")
    warning = "pulse: warning: frozen parts had read this step's data from the last step's iterator"
    assert warning not in before + second and after.count(warning) == 1


def test_a_plan_file_with_frozen_work(tmp_path: Path) -> None:
    for _, output in launch("support.frozen_ranks:runs_a_plan_file", 2, str(tmp_path), timeout=100):
        assert "PASSED" in output


def test_encoders_drawn_anew_on_every_rank_are_refused(tmp_path: Path) -> None:
    for _, output in launch("support.frozen_ranks:differ_in_weights", 2, str(tmp_path), timeout=150):
        assert "PASSED" in output


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def graph(*pops: str) -> Graph:
    return Graph(layers=(Layer(name="first"), Layer(name="second", pop=pops)))


def heads_of_one(first: str) -> tuple[Head, ...]:
    return (Head(name=None, loss_fn=None, input=first, layers=range(2)),)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"text": FrozenSpec([nn.Linear(2, 2)], input="ids")},
            "frozen part 'text': parameter weight of layer 0.Linear is trainable",
        ),
        ({"latents": FrozenSpec([frozen(nn.Linear(2, 2))], input="pixels")}, "'latents', which no layer pops"),
        (
            {
                "text": FrozenSpec([nn.Identity()], input="more"),
                "more": FrozenSpec([spec(nn.Identity(), pop="text")], input="ids"),
            },
            "the frozen parts 'text', 'more' need each other's results",
        ),
        ({"text": FrozenSpec([], input="ids")}, "frozen part 'text': expected at least one layer"),
        (
            {"text": FrozenSpec([spec(nn.Identity(), stash="states")], input="ids")},
            "layer 0.Identity stashes 'states'; a part has one result",
        ),
    ],
)
def test_parts_that_cannot_be(parts: dict[str, FrozenSpec], problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        DeclaredParts(parts, graph("text"), heads_of_one("hidden"))


def test_other_things_than_specs_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a FrozenSpec for 'text', found Identity"):
        DeclaredParts({"text": nn.Identity()}, graph("text"), heads_of_one("hidden"))  # type: ignore[dict-item]


def test_parts_that_cast_one_encoder_to_two_dtypes_are_refused() -> None:
    encoder = frozen(nn.Linear(2, 2))
    parts = {
        "text": FrozenSpec([encoder], input="ids"),
        "more": FrozenSpec([encoder], input="ids", dtype=torch.bfloat16),
    }
    with pytest.raises(ConfigError, match=r"'text' and 'more': expected one dtype for weight, .* and torch.bfloat16"):
        DeclaredParts(parts, graph("text", "more"), heads_of_one("hidden"))
    same = {name: FrozenSpec([encoder], input="ids", dtype=torch.bfloat16) for name in parts}
    assert DeclaredParts(same, graph("text", "more"), heads_of_one("hidden")).results == ("text", "more")


def test_a_plan_of_other_parts_is_refused() -> None:
    declared = DeclaredParts({"text": FrozenSpec([nn.Identity()], input="ids")}, graph("text"), heads_of_one("hidden"))
    costs = FrozenLayer(name="", forward_ms=1.0, param_bytes=0, output_bytes=1, activation_bytes=1)
    declared.check_planned([FrozenPart(name="text", layers=(costs,), targets=(1,))], "plan.json")
    with pytest.raises(ConfigError, match=r"plan.json: frozen part 'text': expected .*\(1, \(\), \(1,\)\), found \(2"):
        declared.check_planned([FrozenPart(name="text", layers=(costs, costs), targets=(1,))], "plan.json")
    with pytest.raises(ConfigError, match=r"'latents': expected .* of no such part"):
        parts = [FrozenPart(name=name, layers=(costs,), targets=(1,)) for name in ("text", "latents")]
        declared.check_planned(parts, "plan.json")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"config": {"pulse": False}}, "turn pulse on"),
        ({"num_stages": "auto"}, 'frozen beside num_stages="auto"'),
        ({"dynamic_shape": True}, "frozen beside dynamic_shape=True"),
        ({"config": {"pulse": {"receive_ahead": False}}}, 'frozen beside "receive_ahead": false'),
        ({}, "pass example_batch="),
    ],
)
def test_what_frozen_parts_do_not_go_with(more: dict[str, Any], problem: str) -> None:
    from deepspeed_pulse import PipelineModule

    config = {"train_micro_batch_size_per_gpu": 1, "pulse": {}, **more.pop("config", {})}
    parts = {"text": FrozenSpec([nn.Identity()], input="ids")}
    layers = [nn.Linear(2, 2), spec(nn.Bilinear(2, 2, 2), pop="text")]
    with pytest.raises(ConfigError, match=problem):
        PipelineModule(layers=layers, config=config, frozen=parts, **{"num_stages": 1, **more})


def test_a_missing_batch_entry_names_the_part() -> None:
    from deepspeed_pulse.engine.data.batches import SplitBatch
    from deepspeed_pulse.errors import BatchError

    declared = DeclaredParts({"text": FrozenSpec([nn.Identity()], input="ids")}, graph("text"), heads_of_one("hidden"))
    with pytest.raises(BatchError, match=r"layer \(frozen\) text pops 'ids', which no layer stashes"):
        SplitBatch(({"hidden": torch.ones(2)}, None), declared.reading_graph, "hidden")
    with pytest.raises(BatchError, match="an entry 'text', and layer \\(frozen\\) text stashes a value of that name"):
        both = {"hidden": torch.ones(2), "ids": torch.ones(2), "text": torch.ones(2)}
        SplitBatch((both, None), declared.reading_graph, "hidden")


def test_a_layer_at_work_needs_what_it_reads_and_what_it_gives() -> None:
    mixed = spec(frozen(nn.Bilinear(4, 3, 5)), pop="mask")
    declared = DeclaredParts(
        {"text": FrozenSpec([frozen(nn.Linear(2, 4)), mixed], input="ids")}, graph("text"), heads_of_one("h")
    )
    entries = {"ids": torch.ones(6, 2), "mask": torch.ones(6, 3), "unread": torch.ones(6, 100)}
    ((part,), given) = declared.measure(entries, torch.device("cpu"))
    assert given["text"].shape == (6, 5)
    assert [layer.output_bytes for layer in part.layers] == [6 * 4 * 4, 6 * 5 * 4]
    assert [layer.activation_bytes for layer in part.layers] == [6 * (2 + 4) * 4, 6 * (4 + 3 + 5) * 4]
    assert [layer.param_bytes for layer in part.layers] == [4 * (2 * 4 + 4), 4 * (4 * 3 * 5 + 5)]
    assert all(layer.forward_ms > 0 for layer in part.layers)
