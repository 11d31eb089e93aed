"""Layers are visited one at a time and left as they were."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.runtime.profiler import measure_layers

CPU = torch.device("cpu")


def chain(length: int) -> Graph:
    return Graph(layers=tuple(Layer(name=str(index)) for index in range(length)))


def test_a_layer_is_dropped_before_the_next_is_made() -> None:
    made: list[weakref.ref[nn.Module]] = []

    def make() -> nn.Module:
        assert not [one for one in made if one() is not None]
        layer = nn.Linear(4, 4)
        made.append(weakref.ref(layer))
        return layer

    measure_layers(chain(4), [make] * 4, torch.randn(2, 4), {}, CPU)
    assert len(made) == 4


def test_gradients_and_buffers_are_what_they_were() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
    layers[0].weight.grad = before = torch.full((4, 4), 7.0)
    measured = measure_layers(chain(2), [lambda one=one: one for one in layers], torch.randn(2, 4), {}, CPU)
    assert layers[0].weight.grad is before
    assert torch.equal(before, torch.full((4, 4), 7.0))
    assert layers[0].bias.grad is None
    assert layers[1].num_batches_tracked == 0
    assert all(cost.forward_ms > 0 for cost in measured.layers)
    assert len(measured.spread) == 2


def test_measuring_takes_no_random_numbers_from_the_run() -> None:
    hidden = torch.randn(2, 4)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    measure_layers(chain(1), [nn.Dropout], hidden, {}, CPU)
    assert torch.equal(torch.rand(3), expected)


def test_every_consumer_reads_a_leaf_of_its_own() -> None:
    """Twice popped, the value's gradients do not meet."""
    seen: list[Tensor] = []

    def stash(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden * 2

    def pop(hidden: Tensor, value: Tensor) -> Tensor:
        seen.append(value)
        return hidden + value

    graph = Graph(
        layers=(
            Layer(name="a"),
            Layer(name="b", stash=("value",)),
            Layer(name="c", pop=("value",)),
            Layer(name="d", pop=("value",)),
        )
    )
    layers = [nn.Linear(4, 4), stash, pop, pop]
    measure_layers(graph, [lambda one=one: one for one in layers], torch.randn(2, 4), {}, CPU)
    assert all(value.is_leaf and value.requires_grad for value in seen)
    assert len({id(value) for value in seen}) == len(seen)
