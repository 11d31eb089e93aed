"""All ranks in one process: same loss and gradients as the unpartitioned model, empty buffers, no skip on the wire."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from support.random_plans import random_plan
from support.reference import Unpartitioned, error
from support.toy import loss_fn, toy_batch, toy_layers

from deepspeed_pulse.engine.specs import describe
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.planner import forward_schedule
from deepspeed_pulse.runtime.local import LocalWorld

GRAPH = Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(toy_layers())))


def world_of(plan: Plan, model: Unpartitioned) -> tuple[LocalWorld, list]:
    batches = [toy_batch(0, m, 0) for m in range(plan.microbatches)]
    world = LocalWorld(plan, GRAPH, model.functions, lambda output, m: loss_fn(output, batches[m][1]))
    return world, [(inputs["hidden"], inputs) for inputs, _ in batches]


@pytest.mark.parametrize("seed", range(12))
def test_gradients_equal_the_unpartitioned_model(seed: int) -> None:
    plan = random_plan(GRAPH, seed, ranks=1 + seed % 4, microbatches=1 + seed % 3)
    model = Unpartitioned(toy_layers())
    twin = copy.deepcopy(model)
    for m in range(plan.microbatches):
        inputs, labels = toy_batch(0, m, 0)
        (loss_fn(twin(inputs), labels) / plan.microbatches).backward()
    mine = Unpartitioned(toy_layers())
    world, batches = world_of(plan, mine)
    for _ in range(2):  # the second step finds every boundary agreed on
        mine.zero_grad()
        world.step(batches)
    for (name, found), expected in zip(mine.named_parameters(), twin.parameters(), strict=True):
        assert error(found.grad, expected.grad) < 1e-5, name


def test_evaluation_leaves_nothing_behind() -> None:
    plan = random_plan(GRAPH, 3, ranks=3, microbatches=4)
    plan = Plan(**{**vars(plan), "schedule": forward_schedule(plan, 4)})
    model = Unpartitioned(toy_layers())
    world, batches = world_of(plan, model)
    with torch.no_grad():
        world.step(batches, training=False)
        for m, loss in world.losses.items():
            inputs, labels = toy_batch(0, m, 0)
            assert float(loss) == pytest.approx(float(loss_fn(model(inputs), labels)), rel=1e-6)


class TheirsError(Exception):
    """A user's own, whose constructor takes more than a message."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


PROBLEMS = [StopIteration("end"), torch.OutOfMemoryError("no memory left"), TheirsError(7, "lost"), KeyError("k")]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, problem: Exception) -> torch.Tensor:
        ctx.problem = problem
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ctx.problem


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: type(problem).__name__)
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_an_exception_of_the_users_keeps_its_class(where: str, problem: Exception) -> None:
    """Step, rank, stage, microbatch and action are added to it, and the layer where there is one."""
    problem.__notes__ = []
    plan = random_plan(GRAPH, 5, ranks=2, microbatches=2)
    model = Unpartitioned(toy_layers())
    batches = [toy_batch(0, m, 0) for m in range(2)]
    steps = []

    def failing(hidden: torch.Tensor, *popped: torch.Tensor) -> Any:
        result = model.by_layer[4](hidden, *popped)
        if where == "forward" and len(steps) > 1:
            raise problem
        return Raises.apply(result, problem) if where == "backward" and len(steps) > 1 else result

    def loss(output: torch.Tensor, m: int) -> torch.Tensor:
        if where == "loss" and len(steps) > 1:
            raise problem
        return loss_fn(output, batches[m][1])

    model.functions[4] = failing
    world = LocalWorld(plan, GRAPH, model.functions, loss)
    with pytest.raises(type(problem)) as caught:
        for step in range(2):
            steps.append(step)
            world.step([(inputs["hidden"], inputs) for inputs, _ in batches])
    assert caught.value is problem
    notes = "\n".join(problem.__notes__)
    action = {"forward": r"\dF0", "backward": r"\dB0", "loss": r"\dF0"}[where]
    assert re.search(rf"step 2, pipeline rank \d, stage \d, microbatch 0, action {action}", notes)
    assert ("in layer 4.Middle" in notes) == (where == "forward")


def test_a_failing_layer_is_named_with_rank_stage_microbatch_and_action() -> None:
    plan = random_plan(GRAPH, 5, ranks=2, microbatches=2)
    model = Unpartitioned(toy_layers())

    calls = []

    def broken(hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        if len(calls) > 1:  # layers are tried before the first step
            raise ValueError("on purpose")
        return hidden

    model.functions[4] = broken
    world, batches = world_of(plan, model)
    stage = plan.stage_of(4)
    where = f"step 1, pipeline rank {plan.placement[stage]}, stage {stage}, microbatch 0, action {stage}F0"
    with pytest.raises(ValueError, match=f"on purpose\nin layer 4.Middle\n{where}"):
        world.step(batches)


def test_live_bytes_count_what_the_order_keeps() -> None:
    """All forwards first keeps more than an order that runs backwards early."""
    peaks = []
    for greedy in (False, True):
        plan = random_plan(GRAPH, 8, ranks=2, microbatches=6, greedy_forward=greedy)
        world, batches = world_of(plan, Unpartitioned(toy_layers()))
        peaks.append(sum(stats.peak_live_bytes for stats in world.step(batches)))
    assert 0 < peaks[0] < peaks[1]
