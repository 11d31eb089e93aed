"""Layers are visited one at a time and left as they were."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.in_place import WIDTH, Normalised
from torch import Tensor, nn

from deepspeed_pulse.engine.device import DeviceClock
from deepspeed_pulse.engine.measure.layers import measure_layers
from deepspeed_pulse.engine.measure.probe import LayerInputs
from deepspeed_pulse.ir.graph import Graph, Layer

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

    measure_layers(chain(4), [make] * 4, LayerInputs(hidden=torch.randn(2, 4), values={}), CPU)
    assert len(made) == 4


def test_gradients_and_buffers_are_what_they_were() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
    layers[0].weight.grad = before = torch.full((4, 4), 7.0)
    measured = measure_layers(
        chain(2), [lambda one=one: one for one in layers], LayerInputs(hidden=torch.randn(2, 4), values={}), CPU
    )
    assert layers[0].weight.grad is before
    assert torch.equal(before, torch.full((4, 4), 7.0))
    assert layers[0].bias.grad is None
    assert layers[1].num_batches_tracked == 0
    assert all(cost.forward_ms > 0 for cost in measured.layers)
    assert all(cost.spread is not None and cost.spread >= 0 for cost in measured.layers)


def test_weights_that_a_layer_normalises_itself_are_what_they_were() -> None:
    layer = Normalised(WIDTH, WIDTH)
    layer.weight.data.mul_(3.0)
    before, weight = layer.weight.detach().clone(), layer.weight
    measure_layers(chain(1), [lambda: layer], LayerInputs(hidden=torch.randn(2, WIDTH), values={}), CPU)
    assert layer.weight is weight and torch.equal(weight, before)


class Moving(nn.BatchNorm1d):
    """Has new buffers wherever it is moved, as between devices; may fail after it has counted a batch."""

    fails = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(lambda t: fn(t).clone(), recurse)

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.fails:
            raise torch.OutOfMemoryError("out of memory")
        return output


def test_buffers_of_a_module_that_was_moved_are_what_they_were() -> None:
    layer = Moving(4)
    before = dict(layer.named_buffers())
    measure_layers(chain(1), [lambda: layer], LayerInputs(hidden=torch.randn(2, 4), values={}), CPU)
    assert all(buffer is before[name] for name, buffer in layer.named_buffers())
    assert layer.num_batches_tracked == 0 and torch.equal(layer.running_mean, torch.zeros(4))


def test_a_layer_that_does_not_fit_is_left_as_it_was() -> None:
    layer = Moving(4)
    layer.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        measure_layers(chain(1), [lambda: layer], LayerInputs(hidden=torch.randn(2, 4), values={}), CPU)
    assert layer.num_batches_tracked == 0 and torch.equal(layer.running_mean, torch.zeros(4))


def test_what_runs_again_neither_counts_what_it_reads_nor_what_it_only_stashes() -> None:
    """A product keeps both factors, 32 bytes each: the input is there, the second one made anew."""

    def layer(hidden: Tensor) -> tuple[Tensor, Tensor]:
        output = hidden * (hidden + 1)
        return output, output

    graph = Graph(layers=(Layer(name="a", stash=("v",)), Layer(name="b", pop=("v",))))
    start = torch.randn(2, 4).requires_grad_()
    made = [lambda: layer, lambda: lambda hidden, v: hidden * v]
    first, second = measure_layers(graph, made, LayerInputs(hidden=start, values={}), CPU).layers
    assert (first.activation_bytes, first.rerun_bytes) == (3 * 32, 32)
    assert (second.activation_bytes, second.rerun_bytes) == (64, 0)


def test_measuring_takes_no_random_numbers_from_the_run() -> None:
    hidden = torch.randn(2, 4)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    measure_layers(chain(1), [nn.Dropout], LayerInputs(hidden=hidden, values={}), CPU)
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
    measure_layers(
        graph, [lambda one=one: one for one in layers], LayerInputs(hidden=torch.randn(2, 4), values={}), CPU
    )
    assert all(value.requires_grad for value in seen)
    assert len({id(value) for value in seen}) == len(seen)


class Ticks(DeviceClock):
    """A clock that goes on when the layer below works, and slower from run to run."""

    now = 0.0

    def mark(self) -> float:
        return Ticks.now

    def times_ms(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class Work(torch.autograd.Function):
    """Forward takes 10 ms, then 1 ms; the gradient of the input 2 ms, that of the weight 3 ms."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        Ticks.now += 10.0 if Ticks.now == 0 else 1.0
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # the engine skips what nobody wants; needs_input_grad is as it was in forward
        nodes = [node for node, _ in ctx.next_functions]
        gradient = gradients[0]
        needs = [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
        Ticks.now += 2.0 * needs[0] + 3.0 * needs[1]
        return gradient if needs[0] else None, gradient.sum() if needs[1] else None


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden: Tensor) -> Tensor:
        return Work.apply(hidden, self.weight)


def test_what_is_measured_is_warm_and_says_the_weights_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticks, "now", 0.0)
    layers = [Layered, Layered, nn.Tanh]
    measured = measure_layers(chain(3), layers, LayerInputs(hidden=torch.randn(2, 4), values={}), CPU, Ticks(CPU))
    first, second, last = measured.layers
    assert (first.forward_ms, first.backward_ms, first.weight_grad_ms, first.spread) == (1.0, 3.0, 3.0, 0.0)
    assert (second.forward_ms, second.backward_ms, second.weight_grad_ms) == (1.0, 5.0, 3.0)
    assert (first.input_grad_ms, second.input_grad_ms, last.input_grad_ms) == (0.0, 2.0, 0.0)
    assert (last.forward_ms, last.weight_grad_ms, last.spread) == (0.0, 0.0, 0.0)


def test_views_of_a_storage_and_parameters_are_not_counted_twice() -> None:
    """Saved of ``(x * y) * x`` are two tensors, views of one, and their product; of a linear layer the input."""

    def views(hidden: Tensor) -> Tensor:
        left, right = hidden.chunk(2, dim=1)
        return (left * right) * left

    layers: list[Any] = [lambda: nn.Linear(4, 8), lambda: views, lambda: nn.Linear(4, 4)]
    measured = measure_layers(chain(3), layers, LayerInputs(hidden=torch.randn(2, 4), values={}), CPU)
    assert [cost.activation_bytes for cost in measured.layers] == [4 * 2 * 4, 4 * (2 * 8 + 2 * 4), 4 * 2 * 4]
    assert [cost.output_bytes for cost in measured.layers] == [4 * 2 * 8, 4 * 2 * 4, 4 * 2 * 4]


def test_gradients_that_wait_for_the_weights_half_are_counted() -> None:
    """Of a linear layer that of its output; where nothing was read, that of what the layer gave."""
    start = LayerInputs(hidden=torch.randn(2, 4), values={})
    layers: list[Any] = [lambda: nn.Linear(4, 8), nn.Tanh, lambda: nn.Linear(8, 5)]
    first, plain, last = measure_layers(chain(3), layers, start, CPU).layers
    assert (first.late_bytes, plain.late_bytes, last.late_bytes) == (4 * 2 * 8, 0, 4 * 2 * 5)


class _Once(torch.autograd.Function):
    """Lets go of what it saved, as some packages' kernels do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = [weight]
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        weight = ctx.kept.pop()
        return gradients[0] * weight, gradients[0].sum()


class Once(Layered):
    def forward(self, hidden: Tensor) -> Tensor:
        return _Once.apply(hidden, self.weight)


class Twice(Layered):
    """Its weight stands behind itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        return Work.apply(Work.apply(hidden, self.weight), self.weight)


def test_of_a_layer_that_cannot_be_divided_no_halves_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ticks, "now", 0.0)
    measured = measure_layers(
        chain(3), [Layered, Once, Twice], LayerInputs(hidden=torch.randn(2, 4), values={}), CPU, Ticks(CPU)
    )
    _, once, twice = measured.layers
    assert (once.weight_grad_ms, once.input_grad_ms) == (None, None)
    assert (twice.weight_grad_ms, twice.input_grad_ms, twice.backward_ms) == (0.0, 10.0, 10.0)


class Third(nn.Linear):
    """Its third forward finds no memory."""

    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(hidden)


@pytest.mark.parametrize("own", [None, torch.ones(4, 4)])
def test_a_layer_that_does_not_fit_keeps_the_gradients_that_it_had(own: Tensor | None) -> None:
    layer = Third(4, 4)
    layer.weight.grad = own
    start = LayerInputs(hidden=torch.randn(2, 4), values={})
    with contextlib.suppress(torch.OutOfMemoryError):
        measure_layers(chain(1), [lambda: layer], start, CPU)
    assert layer.calls == 3
    assert layer.weight.grad is own and layer.bias.grad is None


def test_layers_are_measured_in_training_mode_and_left_in_their_own() -> None:
    """As diffusers loads a model, for evaluation, it would lack the masks of dropout."""
    kept = []
    for mode in (False, True):
        layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train(mode)
        layer[0].eval()
        start = LayerInputs(hidden=torch.randn(8, 64), values={})
        (found,) = measure_layers(chain(1), [lambda layer=layer: layer], start, CPU).layers
        kept.append(found.activation_bytes)
        assert [part.training for part in layer.modules()] == [mode, False, mode]
    assert kept[0] == kept[1]
