"""Autograd's own check holds in every microbatch; what is changed in place has names, copies and refusals by rule."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.in_place import WIDTH, Normalised
from support.local_world import LocalWorld
from support.random_plans import random_plan
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss

from deepspeed_pulse.errors import GraphError, RunError
from deepspeed_pulse.ir.effects import INPUT, Argument, Effects, Version, changed_from_outside, with_versions
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.runtime.discovery import Extent, _renewed, begin, changed_weights, discover
from deepspeed_pulse.runtime.owning import copied, released
from deepspeed_pulse.runtime.settling import check_unsettled
from deepspeed_pulse.runtime.stage import BoundLayer


def world_of(graph: Graph, functions: list[Any], *, seed: int = 0, ranks: int = 2, microbatches: int = 1) -> LocalWorld:
    plan = random_plan(graph, seed, ranks=ranks, microbatches=microbatches, placement=tuple(range(ranks)))
    return LocalWorld(plan, graph, functions, lambda output, m: mse_loss(output, torch.zeros_like(output)))


def plain(*names: str) -> Graph:
    return Graph(layers=tuple(Layer(name=name) for name in names))


@pytest.mark.parametrize("keys", [None, (1, 2)])
def test_what_was_changed_too_early_is_autograds_error_in_every_microbatch(keys: Any) -> None:
    """In the first one of a shape too, whose kept bytes are counted: tanh needs its output, which the next changes."""
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    functions = [lambda x: torch.tanh(modules[0](x)), lambda x: x.add_(1), modules[1]]
    world = world_of(plain("tanh", "add", "linear"), functions, ranks=1, microbatches=1 if keys is None else 2)
    batches = [(torch.randn(2 + m, 4), {}) for m in range(1 if keys is None else 2)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        world.step(batches, shape_keys=keys)


def found(*layers: tuple[Layer, Any], **values: Any) -> tuple[Effects, ...]:
    graph = Graph(layers=tuple(layer for layer, _ in layers))
    bound = {index: BoundLayer(layer, function) for index, (layer, function) in enumerate(layers)}
    hidden, entries, reach = begin(torch.ones(3, 4), values)
    _, effects = discover(bound, graph, hidden, entries, reach)
    return tuple(effects[index] for index in range(len(layers)))


def test_a_stash_that_goes_on_as_the_hidden_state_has_a_version_behind_who_changes_it() -> None:
    layers = [
        (Layer(name="make", stash=("s",)), lambda x: (y := x * 2, y)),
        (Layer(name="change"), lambda x: x.add_(1)),
        (Layer(name="read", pop=("s",)), lambda x, s: x + s),
    ]
    make, change, read = found(*layers)
    assert change.versions == (Version(name="s", is_tuple=False, tensors=(Argument(index=0, tensor=0),)),)
    assert change.changes == make.reads[0] ^ make.reads[0] | change.reads[0] and not make.changes and not read.changes
    graph = with_versions(Graph(layers=tuple(layer for layer, _ in layers)), (make, change, read))
    assert graph.layers[1].stash == ("s after layer 1",) and graph.layers[2].pop == ("s after layer 1",)


def test_a_list_that_changes_nothing_stays_as_it_is() -> None:
    graph = plain("a", "b")
    effects = found((graph.layers[0], lambda x: x * 2), (graph.layers[1], torch.sin))
    assert with_versions(graph, effects) is graph
    assert changed_from_outside(effects, [[INPUT], [""]]) == frozenset()


def test_copies_where_others_read_and_none_where_nobody_does() -> None:
    one, two = (
        Effects(reads=(frozenset({1}), frozenset({2}))),
        Effects(reads=(frozenset({3}),), changes=frozenset({2, 3})),
    )
    assert changed_from_outside([one, two], [[INPUT, "v"], [""]]) == {"v"}
    assert changed_from_outside([one], [[INPUT, "v"]]) == frozenset()
    assert changed_from_outside([one], [[INPUT, "v"]], until=[two]) == {"v"}
    leaf = torch.ones(3, requires_grad=True)
    assert released(leaf).data_ptr() == leaf.data_ptr() and copied(leaf).data_ptr() != leaf.data_ptr()
    released(leaf).relu_().sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_part_of_what_is_popped_later_is_refused_wherever_the_cut_is(ranks: int) -> None:
    graph = Graph(
        layers=(
            Layer(name="make", stash=("s",)),
            Layer(name="change"),
            Layer(name="read", pop=("s",)),
        )
    )
    linear = nn.Linear(4, 4)
    functions = [lambda x: (y := linear(x), y[:, :2]), lambda x: x.add_(1), lambda x, s: x + s.sum()]
    with pytest.raises(
        GraphError, match=r"layer change changes in place memory of 's', which a later layer pops, .*clone"
    ):
        world_of(graph, functions, ranks=ranks).step([(torch.ones(3, 4), {})])


def test_a_change_that_the_first_microbatch_does_not_show_is_an_error_when_it_comes() -> None:
    linear, calls = nn.Linear(4, 4), []

    def sometimes(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.add_(1) if len(calls) > 2 else x + 1

    world = world_of(plain("linear", "sometimes"), [linear, sometimes], ranks=1)
    world.step([(torch.ones(3, 4), {})])
    with pytest.raises(RunError, match="layer sometimes changed its input in place now and did not in the first"):
        world.step([(torch.ones(3, 4), {})])


class Counts(nn.Module):
    """State of every kind that trying a layer must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


class Uncopied(Counts):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("holds a handle")


@pytest.mark.parametrize("kind", [Counts, Uncopied])
def test_trying_a_layer_leaves_it_as_it_was(kind: type[Counts]) -> None:
    layer, state = kind(), torch.random.get_rng_state()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    (effects,) = found((Layer(name="counts"), layer))
    assert effects.buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert kind is Uncopied or layer.calls == 0


def test_a_function_with_a_module_moves_its_buffers() -> None:
    class Calls:
        def __init__(self) -> None:
            self.module = Counts()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) * 2

    layer = Calls()
    (effects,) = found((Layer(name="calls"), layer))
    assert effects.buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert layer.module.calls == 0


def test_trying_layers_holds_what_one_of_them_keeps_for_backward() -> None:
    """A model that fits only with recomputation must fit while it is tried."""
    kept: list[StorageWeakRef] = []
    linear, most = nn.Linear(4, 4), []

    def layer(x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(linear(x))  # which backward needs
        kept.append(StorageWeakRef(inner.untyped_storage()))
        most.append(sum(not one.expired() for one in kept))
        return inner * 2

    found(*((Layer(name=str(i)), layer) for i in range(6)))
    assert max(most) <= 2, "this layer's, and the one's before until it is over"


@pytest.mark.parametrize(
    ("wants", "detached", "gradient"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_changed_value_wants_the_gradient_that_its_tensor_has_in_its_graph(
    wants: bool, detached: bool, gradient: bool
) -> None:
    """What the layer got of it without its graph wants none, nor does what a layer changed that trains nothing."""
    before = Extent(memory=3, offset=0, shape=(2,), stride=(1,), graph=5, gradient=not gradient)
    version = Version(name="v", is_tuple=False, tensors=(Argument(index=1, tensor=0, detached=detached),))
    (after,) = _renewed((before,), version, [torch.zeros(2), torch.zeros(2, requires_grad=wants)])
    assert (after.memory, after.gradient) == (3, gradient)


class Decaying(nn.Linear):
    """Its weight is another one after every forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class Counting(Decaying):
    """So is its other parameter, which does not train."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (Normalised(WIDTH, WIDTH), (("weight",), (), ())),
        (Decaying(WIDTH, WIDTH), ((), ("weight",), ())),
        (Counting(), ((), (), ("weight",))),
        (nn.Linear(WIDTH, WIDTH), ((), (), ())),
    ],
    ids=["normalised", "decaying", "frozen", "plain"],
)
def test_weights_that_a_layer_changes_are_found_and_put_back(layer: nn.Module, names: Any) -> None:
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    graph, bound = plain("layer"), BoundLayer(Layer(name="layer"), layer)
    hidden, entries, reach = begin(torch.ones(3, WIDTH), {})
    _, effects = discover({0: bound}, graph, hidden, entries, reach)
    assert (effects[0].weights, effects[0].unsettled, effects[0].unsettled_frozen) == names
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    versions = [p._version for p in layer.parameters()]
    assert changed_weights(layer, (torch.ones(3, WIDTH),)) == replace(effects[0], reads=Effects().reads)
    assert [p._version for p in layer.parameters()] == versions, "a backward that waits finds what it left"


@pytest.mark.parametrize("halves", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_weight_that_is_normalised_in_forward_serves_all_microbatches_in_flight(seed: int, halves: float) -> None:
    """Gradients are those of one microbatch after the other, in which nothing is in flight."""
    torch.manual_seed(seed)
    layers, alone = ([Normalised(WIDTH, WIDTH) for _ in range(6)] for _ in "ab")
    for layer, other in zip(layers, alone, strict=True):
        other.load_state_dict(layer.state_dict())
    graph = plain(*map(str, range(6)))
    plan = random_plan(graph, seed, ranks=2, microbatches=4, greedy_forward=seed == 0, halves=halves)
    world = LocalWorld(plan, graph, layers, lambda output, m: output.square().mean())
    batches = [(torch.randn(2, WIDTH), {}) for _ in range(4)]
    for _ in range(2):
        world.step(batches)
        for inputs, _ in batches:
            (nn.Sequential(*alone)(inputs).square().mean() / 4).backward()
        for layer, other in zip(layers, alone, strict=True):
            assert torch.allclose(layer.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-7)
            assert torch.allclose(layer.weight, other.weight, rtol=1e-6)
            with torch.no_grad():
                for one in (layer, other):
                    one.weight.sub_(0.1 * one.weight.grad)
                    one.weight.grad = None


def test_a_weight_that_does_not_settle_is_refused_where_backwards_wait() -> None:
    graph = plain("first", "second")
    effects = (Effects(), Effects(unsettled=("weight",)))

    def checked(microbatches: int) -> None:
        plan = random_plan(graph, 0, ranks=1, microbatches=microbatches, greedy_forward=True, placement=(0, 0))
        check_unsettled(plan, graph, effects)

    checked(1)
    with pytest.raises(GraphError, match=r"layer second changes its weight weight in every forward.*train_batch"):
        checked(2)


@pytest.mark.parametrize("kind", ["unsettled", "unsettled_frozen", "weights"])
def test_a_weight_that_does_not_settle_is_refused_where_its_layer_runs_again(kind: str) -> None:
    graph = plain("first", "second")
    effects = (Effects(), Effects(**{kind: ("weight",)}))
    plan = random_plan(graph, 0, ranks=1, microbatches=1, placement=(0, 0))
    check_unsettled(replace(plan, recompute=(0,)), graph, effects)
    refused = pytest.raises(GraphError, match=r"layer second changes its weight weight in every .*runs again in")
    with nullcontext() if kind == "weights" else refused:
        check_unsettled(replace(plan, recompute=(0, 1)), graph, effects)
