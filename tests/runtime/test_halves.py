"""Backward in two halves: the input half gives what others wait for and no gradient of a weight, both together all."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.irregular import data, draw_sketch, gradient, graph_of, reference, sketch_layers
from support.local_world import LocalWorld
from support.random_plans import random_plan
from support.reference import Unpartitioned, error
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import SPLIT, Action, Op
from deepspeed_pulse.runtime.halves import input_half
from deepspeed_pulse.runtime.roots import roots_of, takes_edges
from deepspeed_pulse.runtime.tape import Tape

pytestmark = pytest.mark.skipif(not takes_edges(), reason="this torch begins backward at tensors")


def halves_of(function: Any, *leaves: torch.Tensor) -> Any:
    output = function(*leaves)
    roots = [root for root in roots_of([output]) if root is not None]
    return input_half(roots, [torch.ones_like(output)], leaves)


def gradients(function: nn.Module, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Of a whole backward, of leaves and weights; they are cleared."""
    function(*leaves).sum().backward()
    return cleared(function, *leaves)


def cleared(function: nn.Module, *leaves: torch.Tensor) -> list[torch.Tensor]:
    found = [tensor.grad for tensor in (*leaves, *function.parameters())]
    for tensor in (*leaves, *function.parameters()):
        tensor.grad = None
    return found


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6, bias=False))


def test_the_input_half_leaves_weights_alone_and_the_weight_half_leaves() -> None:
    torch.manual_seed(0)
    layer, leaf = block(), torch.randn(3, 6, requires_grad=True)
    expected = gradients(layer, leaf)
    late = halves_of(layer, leaf)
    assert torch.equal(leaf.grad, expected[0])
    assert all(parameter.grad is None for parameter in layer.parameters())
    late.run()
    assert all(torch.equal(found, wanted) for found, wanted in zip(cleared(layer, leaf), expected, strict=True))


def test_what_waits_for_the_weight_half_is_counted() -> None:
    """A gradient of 3 x 6 numbers at each of three forks, of every stage and microbatch until its weight half ends."""
    layer, leaf = block(), torch.randn(3, 6, requires_grad=True)
    tape = Tape([leaf])
    roots = [root for root in roots_of([layer(leaf)]) if root is not None]
    tape.input_half(roots, [torch.ones(3, 6)], nullcontext)
    assert tape.late_bytes() == 3 * 72
    tape.weight_half(nullcontext)
    assert tape.late_bytes() == 0

    graph = Graph(layers=tuple(Layer(name=str(i)) for i in range(2)))
    world = LocalWorld(one_rank(2, ()), graph, [block(), block()], lambda output, m: output.square().mean())
    (runtime,) = world._ranks
    seen, run = [], runtime._runs[Op.WEIGHT_GRAD]

    def watched(stage: int, m: int) -> None:
        seen.append(runtime.holdings.live["gradients"])
        run(stage, m)

    runtime._runs[Op.WEIGHT_GRAD] = watched
    world.step([(torch.randn(3, 6, requires_grad=True), {}) for _ in range(2)])
    assert seen == [number * 3 * 72 for number in (4, 3, 2, 1)]


def test_a_convolution_computes_each_gradient_once() -> None:
    """Counted by torch: the operations of both halves are those of a whole backward."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    layer, leaf = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8, requires_grad=True)
    output = layer(leaf)
    with FlopCounterMode(display=False) as whole:
        output.sum().backward()
    output = layer(leaf)
    with FlopCounterMode(display=False) as inputs:
        late = input_half([r for r in roots_of([output]) if r], [torch.ones_like(output)], [leaf])
    with FlopCounterMode(display=False) as weights:
        late.run()
    assert inputs.get_total_flops() == weights.get_total_flops() == whole.get_total_flops() / 2 > 0


def test_a_group_norm_of_channels_last_survives_without_its_inputs_gradient() -> None:
    """torch's kernel for it dies when it is asked for the weights' alone."""
    torch.manual_seed(0)
    layer, leaf = nn.GroupNorm(2, 8), torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    expected = gradients(layer, leaf)
    hooked: list[int] = []
    layer.weight.register_post_accumulate_grad_hook(lambda _: hooked.append(1))
    halves_of(layer, leaf).run()
    assert hooked == [1]
    assert all(torch.equal(found, wanted) for found, wanted in zip(cleared(layer, leaf), expected, strict=True))


class Twice(nn.Linear):
    """The same weight, one use behind the other."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(super().forward(hidden)))


class Apart(nn.Module):
    """A branch that nothing which was read leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + self.table(torch.tanh(self.scale))


def test_a_weight_behind_itself_cannot_be_divided() -> None:
    layer, leaf = Twice(6, 6), torch.randn(3, 6, requires_grad=True)
    assert halves_of(layer, leaf) is None
    assert leaf.grad is None and layer.weight.grad is None


class CompiledFunction(torch.autograd.Function):
    """A linear layer as ``torch.compile`` gives one: all gradients at once, of a graph that is not kept."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("requires create_graph=False and retain_graph=False")
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ hidden


class Compiled(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(CompiledFunction.apply(hidden, self.weight) + self.bias)


class Really(nn.Module):
    """Code that torch compiles, as it is none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.compile(backend="aot_eager")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


@pytest.mark.parametrize("kind", [lambda: Compiled(6, 6), pytest.param(Really, marks=pytest.mark.soak)])
def test_what_was_compiled_stays_whole(kind: Any) -> None:
    torch.manual_seed(0)
    layer, leaf = kind(), torch.randn(3, 6, requires_grad=True)
    gradients(layer, leaf)  # its backward is compiled for a graph that is not kept
    assert halves_of(layer, leaf) is None and leaf.grad is None
    late = halves_of(layer, torch.randn(3, 6))
    assert all(parameter.grad is None for parameter in layer.parameters()), "nothing was read, so all is left"
    late.run()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("kind", [lambda: Compiled(6, 6), pytest.param(Really, marks=pytest.mark.soak)])
def test_compiled_layers_train_in_halves_and_run_again(kind: Any) -> None:
    torch.manual_seed(0)
    layers, data_ = [kind(), block(), kind(), kind()], [(torch.randn(3, 6), {}) for _ in range(2)]
    found = []
    graph = Graph(layers=tuple(Layer(name=str(i)) for i in range(4)))
    for recompute in ((), (0, 2)):
        LocalWorld(one_rank(4, recompute), graph, layers, lambda output, m: output.square().mean()).step(data_)
        found.append([gradient for layer in layers for gradient in cleared(layer)])
    for inputs, _ in data_:
        (nn.Sequential(*layers)(inputs).square().mean() / 2).backward()
    expected = [gradient for layer in layers for gradient in cleared(layer)]
    assert all(error(a, b) < 1e-6 for one in found for a, b in zip(one, expected, strict=True))


def test_a_weight_that_several_outputs_share_is_differentiated_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
            self.runs = 0

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            scale = torch.exp(self.scale)
            scale.register_hook(lambda _: setattr(self, "runs", self.runs + 1))
            inner = self.inner(hidden)
            return torch.sin(inner) * scale + torch.cos(inner) * scale

    torch.manual_seed(0)
    layer, leaf = Shared(), torch.randn(3, 6, requires_grad=True)
    expected = gradients(layer, leaf)
    late = halves_of(layer, leaf)
    assert layer.scale.grad is None
    late.run()
    assert layer.runs == 2, "once in each backward"
    assert all(error(found, wanted) < 1e-6 for found, wanted in zip(cleared(layer, leaf), expected, strict=True))


def test_what_an_output_of_weights_alone_shares_with_another_is_there_for_both() -> None:
    torch.manual_seed(0)
    leaf, scale = torch.randn(3, 6, requires_grad=True), nn.Parameter(torch.randn(6))

    def outputs() -> list[torch.Tensor]:
        shared = torch.exp(scale)
        return [leaf * shared, torch.sin(shared)]

    torch.autograd.backward([output.sum() for output in outputs()])
    assert leaf.grad is not None and scale.grad is not None
    expected, leaf.grad, scale.grad = (leaf.grad, scale.grad), None, None
    made = outputs()
    roots = [root for root in roots_of(made) if root is not None]
    late = input_half(roots, [torch.ones_like(output) for output in made], [leaf])
    assert late is not None and scale.grad is None
    late.run()
    assert all(error(found, wanted) < 1e-6 for found, wanted in zip((leaf.grad, scale.grad), expected, strict=True))


def test_a_branch_of_weights_alone_waits_for_the_weight_half() -> None:
    torch.manual_seed(0)
    layer, leaf = Apart(), torch.randn(3, 6, requires_grad=True)
    expected = gradients(layer, leaf)
    late = halves_of(layer, leaf)
    assert layer.scale.grad is None and layer.table.weight.grad is None
    late.run()
    assert all(error(found, wanted) < 1e-6 for found, wanted in zip(cleared(layer, leaf), expected, strict=True))


def test_without_anything_read_all_is_left_to_the_weight_half() -> None:
    layer, data_ = block(), torch.randn(3, 6)
    late = halves_of(layer, data_)
    assert all(parameter.grad is None for parameter in layer.parameters())
    late.run()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 6), nn.Linear(6, 6)], ids=["group norm", "linear"])
def test_a_hook_of_a_weight_changes_its_gradient_once(layer: nn.Module) -> None:
    calls: list[str] = []

    def doubled(gradient: torch.Tensor) -> torch.Tensor:
        calls.append("hook")
        return gradient * 2

    weight, leaf = next(layer.parameters()), torch.randn(3, 6, requires_grad=True)
    weight.register_hook(doubled)
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    expected = gradients(layer, leaf)
    halves_of(layer, leaf).run()
    assert all(torch.equal(found, wanted) for found, wanted in zip(cleared(layer, leaf), expected, strict=True))
    assert calls == ["hook", "accumulated"] * 2


def test_a_hook_of_a_tensor_changes_a_gradient_once() -> None:
    class Hooked(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = super().forward(hidden)
            output.register_hook(lambda gradient: gradient * 3)
            return output

    layer, leaf = Hooked(6, 6), torch.randn(3, 6, requires_grad=True)
    expected = gradients(layer, leaf)
    halves_of(layer, leaf).run()
    assert all(torch.equal(found, wanted) for found, wanted in zip(cleared(layer, leaf), expected, strict=True))


@pytest.mark.filterwarnings("ignore:None of the inputs")  # torch says so of frozen layers
@pytest.mark.parametrize("recompute", ["some", "all", "some, reentrant"])
def test_drawn_networks_with_layers_that_run_again(recompute: str) -> None:
    """Gradients in float64; buffers of dropout and the like are the checkpoint's matter (``test_recomputing``)."""
    again = torch_reentrant if "reentrant" in recompute else None
    for seed in range(20):
        rng = random.Random(seed)
        ranks, microbatches = 1 + seed % 3, 1 + seed % 2
        sketch = draw_sketch(rng, rng.randint(2 * ranks, 12))
        graph, seen, batches = graph_of(sketch), reference(sketch, microbatches), data(microbatches)
        places = Placement.wave(ranks)
        plan = random_plan(graph, seed, ranks=ranks, microbatches=microbatches, placement=places, halves=0.8)
        chosen = [i for i in range(sketch.num_layers) if recompute == "all" or rng.random() < 0.5]
        plan = replace(plan, recompute=tuple(chosen))
        model = Unpartitioned(sketch_layers(sketch)).double()
        options = {} if again is None else {"checkpoint": again}
        world = LocalWorld(plan, graph, model.functions, lambda o, m, b=batches: mse_loss(o, b[m][1]), **options)
        world.step([(inputs["hidden"], inputs) for inputs, _ in batches])
        for name, parameter in model.named_parameters():
            assert error(gradient(parameter), seen.gradients[name]) < 1e-12, (seed, name)


def torch_reentrant(function: Any, *tensors: torch.Tensor) -> Any:
    return torch_checkpoint(function, *tensors, use_reentrant=True)


class Noisy(nn.Module):
    """Random numbers, and how often it runs."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        Noisy.runs += 1
        return nn.functional.dropout(torch.tanh(self.inner(hidden)), 0.5)


def one_rank(num_layers: int, recompute: tuple[int, ...]) -> Plan:
    """Two stages in halves, the weight halves at the end."""
    middle = num_layers // 2
    order = [Action(s, Op.FORWARD, m) for m in range(2) for s in range(2)]
    order += [Action(s, Op.INPUT_GRAD, m) for m in range(2) for s in (1, 0)]
    order += [Action(s, Op.WEIGHT_GRAD, m) for m in range(2) for s in (1, 0)]
    return Plan(
        pipeline_ranks=1,
        data_parallel=1,
        microbatches=2,
        microbatch_size=1,
        boundaries=(0, middle, num_layers),
        placement=(0, 0),
        schedule=(tuple(order),),
        recompute=recompute,
    )


def test_a_layer_that_runs_again_does_so_once_and_draws_the_same_numbers() -> None:
    found = {}
    graph = Graph(layers=tuple(Layer(name=str(i)) for i in range(4)))
    for recompute in ((), (0, 1, 2, 3)):
        torch.manual_seed(1)
        layers = [Noisy() for _ in range(4)]
        world = LocalWorld(one_rank(4, recompute), graph, layers, lambda output, m: output.square().mean())
        batches = [(torch.randn(3, 6), {}) for _ in range(2)]
        torch.manual_seed(2)
        world.step(batches)  # tries the layers first
        Noisy.runs = 0
        torch.manual_seed(3)
        for layer in layers:
            layer.zero_grad()
        world.step(batches)
        found[recompute] = [p.grad.clone() for layer in layers for p in layer.parameters()]
        assert Noisy.runs == 4 * 2 * (2 if recompute else 1)
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


@pytest.mark.parametrize("recompute", [(), (0, 1, 2, 3)])
def test_nothing_is_left_of_a_step(recompute: tuple[int, ...]) -> None:
    """Not even until the garbage collector comes."""
    made: list[StorageWeakRef] = []

    class Watched(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = torch.tanh(super().forward(hidden))
            made.append(StorageWeakRef(output.untyped_storage()))
            return output

    graph = Graph(layers=tuple(Layer(name=str(i)) for i in range(4)))
    world = LocalWorld(one_rank(4, recompute), graph, [Watched(6, 6) for _ in range(4)], lambda o, m: o.square().mean())
    gc.disable()
    try:
        world.step([(torch.randn(3, 6), {}) for _ in range(2)])
        world.losses.clear()
    finally:
        gc.enable()
    assert len(made) >= 8
    assert [number for number, output in enumerate(made) if not output.expired()] == []


def test_weights_have_no_gradient_before_their_own_half() -> None:
    graph = Graph(layers=tuple(Layer(name=str(i)) for i in range(4)))
    layers = [nn.Linear(6, 6) for _ in range(4)]
    seen: dict[str, list[bool]] = {}
    world = LocalWorld(one_rank(4, ()), graph, layers, lambda output, m: output.square().mean())
    (runtime,) = world._ranks
    for op in SPLIT:
        run = runtime._runs[op]

        def watched(stage: int, m: int, run: Any = run, op: Op = op) -> None:
            run(stage, m)
            seen[f"{stage}{op.value}{m}"] = [layer.weight.grad is not None for layer in layers]

        runtime._runs[op] = watched
    world.step([(torch.randn(3, 6), {}) for _ in range(2)])
    assert seen["0I1"] == [False] * 4
    assert seen["1W0"] == [False, False, True, True]
    assert seen["0W0"] == [True] * 4
