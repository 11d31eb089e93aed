"""What every family of models has to show: the layer list is the model, for one rank and for several.

    layers = assert_transparent(model, batch, forward)            # output and gradients
    assert_matches_export(model, layers, batch, forward)          # names, against torch.export's graph

``batch`` is a dict as diffusers training scripts have it; its first entry is the first layer's input, and entries of
nested dicts are popped under dotted names. ``forward(model, batch)`` runs the model's own forward and returns the
output, a tensor or a tuple of tensors.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from support.dataflow import ListFlow, exported, flow_of_list, parts_of, reads_of_export
from support.local_world import LocalWorld
from support.reference import error
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepspeed_pulse.engine.data.batches import flatten
from deepspeed_pulse.engine.specs import describe
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile, Skip
from deepspeed_pulse.models import to_layers
from deepspeed_pulse.planner import Job, SearchOptions, make_plan

Batch = dict[str, Any]
Forward = Callable[[Any, Batch], Tensor]
Gradients = dict[str, Tensor | None]

TOLERANCE = 1e-5
NOISE = 1e-6
"""A gradient below this share of the largest is rounding noise around zero (the bias of attention keys, for one)."""


def interpret(layers: Sequence[Any], batch: Mapping[str, Any]) -> Any:
    """Run a layer list in order with a dictionary of named values: what any engine has to reproduce."""
    values = flatten(batch)
    hidden = values.pop(next(iter(values)))
    for declared in layers:
        output = declared.layer(hidden, *(values[name] for name in declared.pop))
        hidden, *stashed = output if declared.stash else (output,)
        values.update(zip(declared.stash, stashed, strict=True))
    return hidden


# ------------------------------------------------------------------------------------------ transparency


def assert_transparent(
    model: nn.Module,
    batch: Batch,
    forward: Forward,
    *,
    ranks: Sequence[int] = (1, 2, 4),
    without_gradient: Sequence[str] = (),
    make: Callable[..., list[Any]] = to_layers,
    one_owner: bool = True,
    **options: Any,
) -> list[Any]:
    """``make(model, **options)`` computes what the model computes; returns the list.

    On one rank output and every gradient, the first entry's included, are equal bit for bit. For every larger number of
    ``ranks``, wave and linear placement, two microbatches: gradients within 1e-5 (norm of the difference over norm).
    Every gradient must be nonzero, because a zero gradient proves nothing; ``without_gradient`` names parameters that
    the model does not use. Frozen parameters get no gradient. The model's gradients are None afterwards.
    ``one_owner``: each parameter belongs to one layer.
    """
    reference = copy.deepcopy(model)
    layers = make(model, **options)
    graph = Graph(layers=tuple(describe(index, layer) for index, layer in enumerate(layers)))
    if one_owner:
        assert_one_owner(model, layers)
    if 1 in ranks:
        _assert_bitwise(reference, model, layers, batch, forward, without_gradient)
    several = [count for count in ranks if count > 1]
    if several:
        batches = [batch, another(batch)]
        expected, losses = mean_gradients(reference, batches, forward)
        for plan in (plan for count in several for plan in plans(graph, count, len(batches))):
            found, found_losses = planned_gradients(model, layers, graph, plan, batches)
            where = f"{plan.pipeline_ranks} ranks, waves {plan.waves}"
            assert found_losses == losses or error(torch.tensor(found_losses), torch.tensor(losses)) < TOLERANCE, where
            assert_close(found, expected, where)
    return layers


def assert_one_owner(model: nn.Module, layers: Sequence[Any]) -> None:
    """Every parameter of the model belongs to exactly one layer, which holds the parameter itself, not a copy."""
    owners = Counter(id(parameter) for declared in layers for parameter in declared.layer.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wrong = {names.get(key, "not the model's"): count for key, count in owners.items() if count != 1}
    assert not wrong, f"parameters held by several layers: {wrong}"
    assert owners.keys() == names.keys(), [name for key, name in names.items() if key not in owners]


def _assert_bitwise(
    reference: nn.Module,
    model: nn.Module,
    layers: Sequence[Any],
    batch: Batch,
    forward: Forward,
    without_gradient: Sequence[str],
) -> None:
    runs: list[tuple[nn.Module, Callable[[Batch], Tensor]]] = [
        (reference, lambda given: forward(reference, given)),
        (model, lambda given: interpret(layers, given)),
    ]
    outputs, inputs, gradients = [], [], []
    for owner, run in runs:
        given = _with_gradient(batch)
        output = run(given)
        _loss(output).backward()
        outputs.append(_whole(output).detach())
        inputs.append(next(iter(given.values())).grad)
        gradients.append(_taken(owner))
    assert torch.equal(*outputs), f"outputs differ by {error(outputs[1], outputs[0]):.1e}"
    assert (inputs[0] is None) == (inputs[1] is None)
    assert inputs[0] is None or torch.equal(*inputs), "gradients of the first entry differ"
    for name, expected in gradients[0].items():
        found = gradients[1][name]
        if expected is None or found is None:
            assert expected is None and found is None, f"{name}: only one has a gradient"
        else:
            assert torch.equal(found, expected), f"{name}: gradients differ by {error(found, expected):.1e}"
        trained = reference.get_parameter(name).requires_grad and name not in without_gradient
        assert not trained or (expected is not None and expected.any()), f"{name}: a zero gradient proves nothing"


def mean_gradients(model: nn.Module, batches: Sequence[Batch], forward: Forward) -> tuple[Gradients, list[float]]:
    losses = []
    for batch in batches:
        loss = _loss(forward(model, batch))
        (loss / len(batches)).backward()
        losses.append(loss.item())
    return _taken(model), losses


def planned_gradients(
    model: nn.Module, layers: Sequence[Any], graph: Graph, plan: Plan, batches: Sequence[Batch]
) -> tuple[Gradients, list[float]]:
    functions = [declared.layer for declared in layers]
    world = LocalWorld(plan, graph, functions, lambda output, microbatch: _loss(output))
    first, *others = batches[0]
    hidden = [tuple(batch[first]) if isinstance(batch[first], list) else batch[first] for batch in batches]
    world.step([(h, flatten({name: b[name] for name in others})) for h, b in zip(hidden, batches, strict=True)])
    return _taken(model), [world.losses[index].item() for index in range(len(batches))]


def assert_close(found: Gradients, expected: Gradients, where: str) -> None:
    largest = max(float(gradient.norm()) for gradient in expected.values() if gradient is not None)
    for name, wanted in expected.items():
        got = found[name]
        if wanted is None or float(wanted.norm()) <= NOISE * largest:
            assert got is None or float(got.norm()) <= 2 * NOISE * largest, f"{where}: {name}"
        else:
            assert got is not None, f"{where}: {name} has no gradient"
            assert error(got, wanted) < TOLERANCE, f"{where}: {name} is off by {error(got, wanted):.1e}"


def _whole(output: Any) -> Tensor:
    """A tuple of outputs as one tensor."""
    return torch.cat([part.flatten() for part in output]) if isinstance(output, tuple) else output


def _loss(output: Any) -> Tensor:
    """Weights every element of the output differently."""
    output = _whole(output)
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)).sum()


def _with_gradient(batch: Batch) -> Batch:
    """The batch with a first entry that collects its gradient."""
    first, *_ = batch
    value = batch[first]
    return {**batch, first: value.clone().requires_grad_()} if value.is_floating_point() else dict(batch)


def another(batch: Batch) -> Batch:
    """Another microbatch of the same shapes: the samples in reverse order, the first entry halved."""
    first, *_ = batch
    turned = tree_map_only(Tensor, lambda value: value.flip(0) if value.ndim else value, batch)
    return {**turned, first: tree_map_only(Tensor, lambda x: x / 2 if x.is_floating_point() else x, turned[first])}


def _taken(model: nn.Module) -> Gradients:
    """All gradients; the model is left without."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def plans(
    graph: Graph, ranks: int, microbatches: int, placements: Sequence[str] = ("wave", "linear")
) -> Iterator[Plan]:
    """The planner's plans for layers of equal cost."""
    cost = LayerCost(
        name="", forward_ms=1.0, backward_ms=2.0, param_bytes=4, activation_bytes=4, output_bytes=1_000_000
    )
    profile = Profile(
        name="uniform",
        device="cpu",
        dtype="float32",
        microbatch_size=1,
        layers=tuple(replace(cost, name=layer.name) for layer in graph.layers),
        skips=tuple(
            Skip(name=value.name, source=int(value.source or 0), target=target, bytes=1_000_000)
            for value in graph.values
            for target in value.targets
        ),
    )
    link = Link(bandwidth_gb_per_s=100.0, latency_us=1.0)
    cluster = Cluster(name="one", nodes=1, ranks_per_node=ranks, memory_bytes=2**40, intra_node=link, inter_node=link)
    for placement in placements:
        yield make_plan(
            Job(profile=profile, cluster=cluster, pipeline_ranks=ranks, microbatches=microbatches),
            SearchOptions(placement=placement, solver_seconds=0),
        )


# -------------------------------------------------------------------------------------- torch.export's graph


def assert_matches_export(
    model: nn.Module, layers: Sequence[Any], batch: Batch, forward: Forward, *more_layers: Sequence[Any]
) -> None:
    """The list reads what the model reads, by the graph that ``torch.export`` makes of the model's own forward.

    ``more_layers`` are further lists of the same model (exporting takes long).

    Every submodule that a layer was made of reads the same other submodules and batch entries in both, and every popped
    value and hidden state is looked at by its layer. Where the list pops two values of equal shape, it is then
    run with those two swapped, which has to be noticed.
    """
    program = exported(model, batch, forward)
    for each in (layers, *more_layers):
        _assert_same_reads(each, program, batch, parts_of(model, each))


def _assert_same_reads(layers: Sequence[Any], program: Any, batch: Batch, parts: dict[str, nn.Module]) -> None:
    expected = reads_of_export(program, batch, parts)
    flow = flow_of_list(layers, flatten(batch), parts)
    problems = differences(flow, expected)
    assert not problems, "\n".join(problems)
    swapped = swap_two_pops(layers, flow.shapes)
    if swapped is not None:
        assert differences(flow_of_list(swapped, flatten(batch), parts), expected), "two swapped pops were not noticed"


def differences(flow: ListFlow, expected: Mapping[str, frozenset[str]]) -> list[str]:
    """Each part that reads something else in the list than in the exported model, and each value read in vain."""
    problems = [f"{where} is not read" for where in flow.unused]
    for part in sorted(flow.reads.keys() | expected.keys()):
        found, wanted = flow.reads.get(part, frozenset()), expected.get(part, frozenset())
        if found != wanted:
            problems.append(
                f"{part}: in the model it reads also {sorted(wanted - found)}, in the list {sorted(found - wanted)}"
            )
    return problems


def swap_two_pops(layers: Sequence[Any], shapes: Mapping[str, tuple[int, ...]]) -> list[Any] | None:
    """The list with two values of equal shape popped in each other's place; None when it has no such two."""
    producers = {name: index for index, declared in enumerate(layers) for name in declared.stash}
    consumers = Counter(name for declared in layers for name in declared.pop)
    seen: dict[tuple[int, ...], tuple[int, str]] = {}
    for index, declared in enumerate(layers):
        for name in declared.pop:
            if consumers[name] != 1 or name not in producers or name not in shapes:
                continue
            other, other_name = seen.setdefault(shapes[name], (index, name))
            if other != index and producers[name] < other:
                swapped = list(layers)
                swapped[index] = _popping(declared, name, other_name)
                swapped[other] = _popping(layers[other], other_name, name)
                return swapped
    return None


def _popping(declared: Any, old: str, new: str) -> Any:
    return replace(declared, pop=tuple(new if name == old else name for name in declared.pop))
