"""Layers run again in backward: same gradients and random numbers, less kept, whatever goes in and out."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint as deepspeed_reentrant
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from support.local_world import LocalWorld
from support.random_plans import random_plan
from support.reference import Unpartitioned, error
from support.toy import loss_fn, toy_batch, toy_layers
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_pulse.engine.specs import describe
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.runtime.recomputing import non_reentrant
from deepspeed_pulse.runtime.stage import BoundLayer, SavedBytes, Stage

GRAPH = Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(toy_layers())))


def torch_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=True)


WAYS = [non_reentrant, torch_reentrant, deepspeed_reentrant, non_reentrant_checkpoint]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_without_it(way: Any, seed: int) -> None:
    """Random cuts, orders and layers; popped values inside and across runs, stashed ones out of them."""
    plan = random_plan(GRAPH, seed, ranks=1 + seed % 3, microbatches=2)
    plan = replace(plan, recompute=(tuple(range(10)), (0, 2, 3, 7), (4, 5, 6, 8, 9), (0, 1, 9))[seed])
    found = []
    for kind, interval in ((None, 1), (way, 1), (way, 3)):
        model = Unpartitioned(toy_layers())
        batches = [toy_batch(0, m, 0) for m in range(2)]
        world = LocalWorld(
            plan if kind else replace(plan, recompute=()),
            GRAPH,
            model.functions,
            lambda output, m, batches=batches: loss_fn(output, batches[m][1]),
            checkpoint=kind or non_reentrant,
            interval=interval,
        )
        stats = world.step([(inputs["hidden"], inputs) for inputs, _ in batches])
        peak = sum(x.peak_live_bytes for x in stats)
        found.append((peak, [copy.deepcopy(p.grad) for p in model.parameters()]))
    (most, expected), *others = found
    for peak, gradients in others:
        assert peak < most
        assert all(error(a, b) < 1e-6 for a, b in zip(gradients, expected, strict=True))


def stage(*layers: Any, way: Any = non_reentrant, interval: int = 8, exports: tuple[str, ...] = ()) -> Stage:
    bound = [BoundLayer(declared, function, recompute=True) for declared, function in layers]
    return Stage(bound, exports, checkpoint=way, interval=interval)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(torch.tanh(self.inner(x)), 0.5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_random_numbers_are_the_same_again_and_inputs_need_no_gradient(way: Any, needs_gradient: bool) -> None:
    """The first stage's input is data: reentrant checkpointing alone would give the parameters no gradient."""
    torch.manual_seed(0)
    layers = [(Layer(name=str(i)), Noisy()) for i in range(3)]
    hidden = torch.randn(5, 4).requires_grad_(needs_gradient)
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        bound = [BoundLayer(declared, module, recompute=recompute) for declared, module in layers]
        output, _ = Stage(bound, (), checkpoint=way, interval=2).run(hidden, lambda name: None)
        between = torch.rand(1)
        output.sum().backward()
        found.append([between, torch.rand(1), *(p.grad.clone() for _, m in layers for p in m.parameters())])
        for _, module in layers:
            module.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Mixed(nn.Module):
    """Passes on integers, a constant, its own input and one tensor twice; reads a number and a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, state: Any, pair: Any, factor: float) -> Any:
        x, ids = state
        y = torch.tanh(self.inner(x)) * pair[0] + pair[1] * factor
        return (y, ids + 1), y, x, [ids, torch.ones(2)]


@pytest.mark.parametrize("way", WAYS)
def test_anything_may_go_in_and_out(way: Any) -> None:
    torch.manual_seed(0)
    module = Mixed()
    declared = Layer(name="mixed", stash=("y", "x", "rest"), pop=("pair", "factor"))
    found = []
    for recompute in (False, True):
        x, a = (torch.linspace(0, 1, 4).reshape(1, 4).requires_grad_() for _ in range(2))
        values = {"pair": (a, torch.ones(4)), "factor": 2.0}
        bound = [BoundLayer(declared, module, recompute=recompute)]
        (y, ids), more = Stage(bound, ("y", "x", "rest"), checkpoint=way).run((x, torch.arange(3)), values.get)
        assert ids.tolist() == [1, 2, 3]
        assert more["rest"][0].tolist() == [0, 1, 2]
        ((y * 2).sum() + more["y"].sum() + (more["x"] ** 2).sum()).backward()
        found.append([y, x.grad, a.grad, *(p.grad.clone() for p in module.parameters())])
        module.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_outputs_need_the_default_way_and_are_not_kept_alive() -> None:
    layers = [(Layer(name="out"), lambda x: {"sample": x * 2})]
    x = torch.ones(3, requires_grad=True)
    output, _ = stage(*layers).run(x, lambda name: None)
    output["sample"].sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    gone = weakref.ref(output["sample"])
    del output
    gc.collect()
    assert gone() is None
    with pytest.raises(GraphError, match="layers out: activation_checkpoint_func takes layers that return tensors"):
        stage(*layers, way=torch_reentrant).run(x, lambda name: None)


def test_a_failing_layer_is_named_in_its_first_run() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")

    layers = [(Layer(name="good"), lambda x: x), (Layer(name="bad"), broken)]
    with pytest.raises(ValueError, match="on purpose\nin layer bad"):
        stage(*layers).run(torch.ones(1, requires_grad=True), lambda name: None)


def test_what_is_kept_is_the_input_of_each_run() -> None:
    layers = [(Layer(name=str(i)), Noisy()) for i in range(4)]
    kept = {}
    for interval in (1, 2, 4):
        with SavedBytes([p for _, m in layers for p in m.parameters()]) as saved:
            stage(*layers, interval=interval).run(torch.ones(5, 4), lambda name: None, saved=saved)
        kept[interval] = saved.bytes // (5 * 4 * 4)
    assert kept == {1: 4, 2: 2, 4: 1}


def test_seeded_layers_draw_the_same_again_and_by_number() -> None:
    seeds: list[tuple[int, int]] = []

    def seeded(index: int) -> Callable[[int], None]:
        def seed(number: int) -> None:
            seeds.append((index, number))
            torch.manual_seed(100 * number + index)

        return seed

    torch.manual_seed(0)
    modules = [Noisy(), Noisy()]
    outputs = []
    for recompute, number in ((False, 7), (True, 7), (False, 8)):
        bound = [BoundLayer(Layer(name=str(i)), m, recompute, seeded(i)) for i, m in enumerate(modules)]
        output, _ = Stage(bound, ()).run(torch.ones(5, 4), lambda name: None, number=number)
        output.sum().backward()
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    # Recomputed one by one, the last first.
    assert seeds == [(0, 7), (1, 7), (0, 7), (1, 7), (1, 7), (0, 7), (0, 8), (1, 8)]


def test_without_gradients_nothing_is_run_twice() -> None:
    count = []
    layers = [(Layer(name="once"), lambda x: count.append(1) or x * 2)]
    with torch.no_grad():
        stage(*layers).run(torch.ones(1), lambda name: None)
    assert len(count) == 1


def test_the_layer_that_returned_what_cannot_travel_is_named() -> None:
    """The last of those that are not recomputed, when the first that is gets it."""
    names, same = ("one", "two", "three", "four"), lambda x: x
    functions = [same, same, lambda x: "text", same]
    bound = [BoundLayer(Layer(name=n), f, recompute=n == "four") for n, f in zip(names, functions, strict=True)]
    with pytest.raises(GraphError, match="layer three returned"):
        Stage(bound, (), checkpoint=non_reentrant, interval=1).run(torch.randn(2, 4), lambda name: None)
