"""Frozen parts on one rank: order, memory that is given back, and results of one shape."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.local_world import LocalDevice

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.ir.fill import Fill, Filling, FrozenLayer, FrozenPart, FrozenRun, HandOver
from deepspeed_pulse.ir.graph import Layer
from deepspeed_pulse.runtime.frozen import FrozenLayers, FrozenRuntime


def runtime(*functions):
    layers = tuple((Layer(name=str(i)), function) for i, function in enumerate(functions))
    part = FrozenLayers(name="text", input="ids", layers=layers, dtype=torch.float64)
    return FrozenRuntime(
        rank=0,
        parts={"text": part},
        reads=["text"],
        communicator=None,  # one rank sends nothing
        device=LocalDevice(microbatches=2),
        timeout_seconds=1.0,
    )


def fill_of(*runs):
    costs = FrozenLayer(name="", forward_ms=1.0, param_bytes=0, output_bytes=1, activation_bytes=1)
    part = FrozenPart(name="text", layers=(costs, costs), targets=(0,))
    return Fill(parts=(part,), rows=(tuple(Filling(at, FrozenRun("text", *run)) for at, run in runs),))


def test_layers_run_where_the_fill_puts_them_without_gradient_in_their_own_dtype():
    seen = []
    frozen = runtime(lambda x: seen.append("first") or x + 1, lambda x: seen.append("second") or 2 * x)
    ids = torch.ones(2, requires_grad=True)
    fill = fill_of((0, (0, 1, 0)), (1, (1, 2, 0)), (1, (0, 2, 1)))
    frozen.begin(fill, lambda name, m: ids * m, microbatches=2, mode="train")
    frozen.run(0)
    assert seen == ["first"]
    frozen.run(1)
    found = frozen.finish()
    assert seen == ["first", "second", "first", "second"]
    assert {key: value.tolist() for key, value in found.items()} == {("text", 0): [2, 2], ("text", 1): [4, 4]}
    assert found["text", 0].dtype is torch.float64 and not found["text", 0].requires_grad
    assert [str(span.work) for span in frozen.stopwatch.spans] == ["text[0:1]@0", "text[1:2]@0", "text[0:2]@1"]
    assert not frozen._held


def test_what_goes_on_elsewhere_is_dropped_and_what_is_read_here_stays():
    frozen, sent, counted = runtime(lambda x: x + 1, lambda x: 2 * x), [], []
    frozen._transport = SimpleNamespace(
        begin=lambda *a: None,
        send=lambda message, value: sent.append(message.name),
        drain=lambda: None,
        sent_bytes={},
        buffer_bytes=100,
        leaving_bytes=10,
    )
    runs = [
        FrozenRun("text", 0, 1, 0),
        HandOver("text", 1, 0, 1),
        FrozenRun("text", 0, 2, 1),
        HandOver("text", 2, 1, 1),
    ]
    fill = replace(fill_of(), rows=(tuple(Filling(0, work) for work in runs), ()))
    count = lambda *given: counted.append(given)  # noqa: E731
    frozen.begin(fill, lambda name, m: torch.ones(2), microbatches=2, mode="train", count=count)
    frozen.run(0)
    assert [change for change, _ in counted] == [0, 16, -16, 0, 16], "two numbers of eight bytes"
    assert [now for _, now in counted] == [111, 110, 110, 111, 110], "what runs needs a byte, and messages are there"
    assert sent == ["text[1]", "text[2]"]
    assert [*frozen._held] == [("text", 2, 1)]


def test_an_encoder_whose_output_changes_its_shape_is_named():
    frozen = runtime(lambda x: x, lambda x: x)
    frozen.begin(
        fill_of((0, (0, 2, 0)), (0, (0, 2, 1))), lambda name, m: torch.ones(2 + m), microbatches=2, mode="train"
    )
    with pytest.raises(BatchError, match=r"frozen part 'text': expected .*2.* as for the first microbatch, found .*3"):
        frozen.run(0)


def test_an_error_names_the_layer():
    frozen = runtime(lambda x: x, lambda x: x @ x.new_ones(5))
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: torch.ones(2), microbatches=1, mode="train")
    with pytest.raises(RuntimeError, match=r"(?s)tensor size.*\nin layer 1"):
        frozen.run(0)


def test_what_layers_of_an_encoder_hand_on_are_tensors_wherever_a_plan_cuts():
    frozen = runtime(lambda x: {"hidden": x}, lambda x: x["hidden"])
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: torch.ones(2), microbatches=1, mode="train")
    with pytest.raises(GraphError, match=r"layer 0 of frozen part 'text' returned: expected a tensor .* of type dict"):
        frozen.run(0)


def test_an_encoder_in_inference_mode_gives_what_may_be_kept_for_backward():
    frozen = runtime(torch.inference_mode()(lambda x: x * 2), torch.inference_mode()(lambda x: x + 1))
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: torch.ones(2), microbatches=1, mode="train")
    frozen.run(0)
    weight = torch.ones(2, requires_grad=True)
    (weight * frozen.finish()["text", 0]).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3, 3]


def test_an_encoder_that_changes_its_input_in_place_leaves_the_data_alone():
    frozen = runtime(lambda x: x.mul_(3), lambda x: x + 1)
    ids = torch.ones(2, dtype=torch.float64)
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: ids, microbatches=1, mode="train")
    frozen.run(0)
    assert frozen.finish()["text", 0].tolist() == [4, 4] and ids.tolist() == [1, 1]
