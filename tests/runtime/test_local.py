"""All ranks in one process: same loss and gradients as the unpartitioned model, empty buffers, no skip on the wire."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from support.local_world import ListedBatches, LocalDevice, LocalWorld
from support.random_plans import random_plan
from support.reference import Unpartitioned, error
from support.toy import loss_fn, toy_batch, toy_layers
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_pulse.engine.specs import describe
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan, Route
from deepspeed_pulse.ir.schedule import WHOLE, Action
from deepspeed_pulse.planner import forward_schedule
from deepspeed_pulse.runtime.roots import takes_edges

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


def test_each_rank_gives_each_microbatch_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last of its stages has read it, so that no more of the data is held than is in flight."""
    given_back: list[int] = []
    monkeypatch.setattr(ListedBatches, "release", lambda self, microbatch: given_back.append(microbatch))
    plan = random_plan(GRAPH, 2, ranks=3, microbatches=4)
    world, batches = world_of(plan, Unpartitioned(toy_layers()))
    world.step(batches)
    assert sorted(given_back) == sorted([*range(4)] * 3)


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


@pytest.mark.skipif(not takes_edges(), reason="this torch begins backward at tensors")
def test_what_was_sent_is_kept_by_nobody() -> None:
    """All forwards go first: when a gradient comes back, the other ranks have taken all outputs and skips."""
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    class First(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = super().forward(hidden)
            output = found * 2, found * 3  # of a product by a number, autograd saves nothing
            made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in output)
            return output

    class Last(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden + skip)

    layers = First(8, 8), torch.nn.Linear(8, 8), Last(8, 8)
    layers[0].weight.register_hook(lambda _: alive.append(sum(not output.expired() for output in made)))
    graph = Graph(
        layers=(Layer(name="first", stash=("skip",)), Layer(name="second"), Layer(name="last", pop=("skip",)))
    )
    plan = Plan(
        pipeline_ranks=3,
        data_parallel=1,
        microbatches=4,
        microbatch_size=1,
        boundaries=(0, 1, 2, 3),
        placement=Placement.linear(3),
        schedule=tuple(tuple(Action(stage, op, m) for op in WHOLE for m in range(4)) for stage in range(3)),
        routes=(Route(name="skip", source_stage=0, hops=((0, 1), (1, 2))),),
    )
    world = LocalWorld(plan, graph, layers, lambda output, m: output.mean())
    world.step([(torch.ones(1, 8), {})] * 4)
    assert alive == [0] * 4


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


def test_a_rank_alone_receives_nothing() -> None:
    world, batches = world_of(random_plan(GRAPH, 8, ranks=1, microbatches=2), Unpartitioned(toy_layers()))
    (stats,) = world.step(batches)
    assert (stats.peak_parts["received"], stats.peak_parts["recomputed"]) == (0, 0)


def test_live_bytes_count_what_the_order_keeps() -> None:
    """All forwards first keeps more than an order that runs backwards early."""
    peaks = []
    for greedy in (False, True):
        plan = random_plan(GRAPH, 8, ranks=2, microbatches=6, greedy_forward=greedy)
        world, batches = world_of(plan, Unpartitioned(toy_layers()))
        peaks.append(sum(stats.peak_live_bytes for stats in world.step(batches)))
    assert 0 < peaks[0] < peaks[1]


@pytest.mark.parametrize("seed", range(6))
def test_all_bytes_that_were_counted_go_again(seed: int) -> None:
    plan = random_plan(GRAPH, seed, ranks=2 + seed % 3, microbatches=3, halves=0.5)
    world, batches = world_of(plan, Unpartitioned(toy_layers()))
    for _ in range(2):  # the second step finds every boundary agreed on
        for runtime, stats in zip(world._ranks, world.step(batches), strict=True):
            assert sum(stats.peak_parts.values()) == stats.peak_live_bytes > 0
            assert set(runtime.holdings.live.values()) == {0}
            assert (runtime._transport.buffer_bytes, runtime._transport.leaving_bytes) == (0, 0)


def test_received_values_are_counted_until_they_were_read_or_sent_on() -> None:
    """Rank 1 only passes the skip on. However many microbatches follow one another, no rank holds more of them."""
    layers = [torch.nn.Linear(64, 64) for _ in range(3)]
    functions = [lambda x: (y := layers[0](x), y), layers[1], lambda x, skip: layers[2](x + skip)]
    graph = Graph(
        layers=(Layer(name="first", stash=("skip",)), Layer(name="second"), Layer(name="last", pop=("skip",)))
    )
    peaks = []
    for microbatches in (3, 8):
        plan = Plan(
            pipeline_ranks=3,
            data_parallel=1,
            microbatches=microbatches,
            microbatch_size=1,
            boundaries=(0, 1, 2, 3),
            placement=Placement.linear(3),
            schedule=tuple(tuple(Action(s, op, m) for m in range(microbatches) for op in WHOLE) for s in range(3)),
            routes=(Route(name="skip", source_stage=0, hops=((0, 1), (1, 2))),),
        )
        world = LocalWorld(plan, graph, functions, lambda output, m: output.mean())
        peaks.append([stats.peak_live_bytes for stats in world.step([(torch.ones(50, 64), {})] * microbatches)])
    assert peaks[0] == peaks[1]


def test_edges_are_taken_where_this_torch_begins_backward_at_them() -> None:
    leaf = torch.ones(2, requires_grad=True)
    try:
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(leaf * 3)], [torch.ones(2)])  # type: ignore[list-item]
    except (AttributeError, TypeError, RuntimeError):
        assert not takes_edges()
    else:
        assert takes_edges() and leaf.grad.tolist() == [3.0, 3.0]


def test_marks_are_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = LocalDevice(microbatches=1), iter((1.5, 2.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    first, second = device.times_ms([device.mark(), device.mark()])
    assert second - first == 500.0


@pytest.mark.parametrize("refusal", [AttributeError, TypeError, RuntimeError])
def test_a_torch_that_refuses_edges_is_given_tensors(refusal: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise refusal("no edges")

    monkeypatch.setattr(torch.autograd, "backward", refused)
    assert not takes_edges.__wrapped__()
