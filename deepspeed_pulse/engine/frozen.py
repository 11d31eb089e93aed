"""Frozen parts as users declare them: encoders whose results the model's layers read like entries of the batch."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepspeed_pulse.engine.backbones import FROZEN, Head
from deepspeed_pulse.engine.collectives import everywhere, told_by_all
from deepspeed_pulse.engine.conditioning import DeclaredConditioning
from deepspeed_pulse.engine.device import DeviceClock, same_random_numbers
from deepspeed_pulse.engine.plans.costs import built
from deepspeed_pulse.engine.specs import describe, unwrap
from deepspeed_pulse.errors import ConfigError, FileError, GraphError
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart, in_order
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.runtime.frozen import FrozenLayers
from deepspeed_pulse.runtime.payload import map_tensors, num_bytes, tensors_in

_TIMED_RUNS = 3
_DIGESTED = 4096
"""Numbers of a tensor that are compared between ranks, about."""


@dataclass(frozen=True)
class FrozenSpec:
    """A frozen part: a list of layers (or a module) that runs without gradient in the pipeline's idle time.

    The first layer reads ``input``, an entry of the batch or another part's name; any layer may ``pop`` more of them.
    The last layer's output, a tensor or a tuple of tensors, is what the model's layers pop under the part's name.

    Modules are not copied: they move to the device of a rank that runs them, in ``dtype``, and to the CPU elsewhere. A
    script that uses one itself, a VAE's encoder say, finds it there; it must not move it or cast it back.

    Args:
        layers: modules, functions, ``spec(...)`` or ``LayerSpec``s; modules must have no trainable parameter.
        dtype: of the weights and of floating inputs; None leaves both as they are.
        ranks: pipeline ranks that may hold and run the part; None: the planner chooses among all.
    """

    layers: Any
    input: str
    dtype: torch.dtype | None = None
    ranks: Sequence[int] | None = None


class DeclaredParts:
    """The frozen parts of a module, checked against its layers.

    A GraphError names a part that nobody reads, that needs itself, stashes, or has a trainable parameter.
    """

    def __init__(
        self,
        specs: Mapping[str, FrozenSpec],
        graph: Graph,
        heads: Sequence[Head],
        conditioning: DeclaredConditioning | None = None,
    ) -> None:
        for name, given in specs.items():
            if not isinstance(given, FrozenSpec):
                raise ConfigError(f"frozen: expected a FrozenSpec for {name!r}, found {type(given).__name__}")
            if given.ranks is not None and not [*given.ranks]:
                raise ConfigError(f"frozen: {name!r}: ranks: expected at least one, or None for all, found none")
        _check_owners(specs, heads)
        self._specs = dict(specs)
        first = {head.layers.start: head.value(head.input) for head in heads}
        self.makes_inputs = {index: name for index, name in enumerate(first.values()) if name in specs}
        """By backbone, the part that makes its first layer's input."""
        one_or_more = {name: given.layers for name, given in specs.items()}
        self._layers = {name: list(x) if isinstance(x, (list, tuple)) else [x] for name, x in one_or_more.items()}
        self._graphs = {name: _graph_of(name, layers) for name, layers in self._layers.items()}
        popped = {name: [pop for layer in own.layers for pop in layer.pop] for name, own in self._graphs.items()}
        self._reads = {name: tuple(dict.fromkeys((specs[name].input, *more))) for name, more in popped.items()}
        """Everything a part reads, its input first."""
        self._needs = {name: tuple(r for r in reads if r in specs) for name, reads in self._reads.items()}
        self._targets = {
            name: tuple(i for i, layer in enumerate(graph.layers) if name in layer.pop or first.get(i) == name)
            for name in specs
        }
        if conditioning is not None:
            estimated = {name: conditioning.reads_input(name) for name in specs}
            self._targets = {name: tuple(sorted({*found, *estimated[name]})) for name, found in self._targets.items()}
        _refuse_trainable(self._layers)
        _check_dtypes(specs, self._layers)
        self.names = self._order()
        self.reading_graph = self._reading_graph(graph, first)

    @property
    def described(self) -> dict[str, tuple[Graph, list[Any]]]:
        """By name, what a part's layers read and the layers themselves."""
        return {name: (self._graphs[name], self._layers[name]) for name in self.names}

    @property
    def given(self) -> dict[str, tuple[str, torch.dtype | None]]:
        """By name, the entry that a part's first layer reads, and the dtype that the part runs in."""
        return {name: (self._specs[name].input, self._specs[name].dtype) for name in self.names}

    @property
    def results(self) -> tuple[str, ...]:
        """Parts whose results layers of the model read; those of others only parts read."""
        return tuple(name for name in self.names if self._targets[name])

    def _order(self) -> tuple[str, ...]:
        """Names, what a part needs before it."""
        dummy = FrozenLayer(name="", forward_ms=0.0, param_bytes=0, output_bytes=0, activation_bytes=0)
        try:
            return tuple(part.name for part in in_order([self.part(name, (dummy,)) for name in self._specs]))
        except FileError as problem:
            raise GraphError(f"frozen: {problem}") from None

    def _reading_graph(self, graph: Graph, first: Mapping[int, str]) -> Graph:
        """The model's graph behind a layer for each part: its batch entries are what the data must have."""
        parts = [Layer(name=f"{FROZEN}{name}", stash=(name,), pop=self._reads[name]) for name in self.names]
        layers = list(graph.layers)
        for index, name in first.items():
            if name in self.makes_inputs.values():
                layers[index] = replace(layers[index], pop=(name, *layers[index].pop))
        return Graph(layers=(*parts, *layers))

    def check_frozen(self) -> None:
        """Raise a GraphError where a script has let a part train since it was declared."""
        _refuse_trainable(self._layers)

    def build(self, names: Sequence[str], device: torch.device) -> dict[str, FrozenLayers]:
        """All parts; the layers of those in ``names`` on a device, in evaluation mode, the others without functions."""
        found = {}
        for name in self.names:
            spec, seed = self._specs[name], zlib.crc32(name.encode())
            functions: list[Callable[..., Any]] = [_nowhere] * len(self._layers[name])
            if name in names:
                functions = [_frozen(x, seed + i, device, spec.dtype) for i, x in enumerate(self._layers[name])]
            layers = tuple(zip(self._graphs[name].layers, functions, strict=True))
            found[name] = FrozenLayers(name=name, input=spec.input, layers=layers, dtype=spec.dtype)
        return found

    def measure(
        self, entries: Mapping[str, Any], device: torch.device
    ) -> tuple[tuple[FrozenPart, ...], dict[str, Any]]:
        """What every layer costs for a batch of these entries, and what the parts give."""
        values = {name: map_tensors(value, lambda tensor: tensor.to(device)) for name, value in entries.items()}
        parts, clock = [], DeviceClock(device)
        for name in self.names:
            frozen = self.build([name], device)[name]
            layers: list[FrozenLayer] = []
            hidden = None
            for index in range(len(frozen.layers)):
                costs, hidden = _measured(frozen, index, hidden, values, clock)
                layers.append(costs)
            values[name] = hidden
            parts.append(self.part(name, tuple(layers)))
            for layer in map(unwrap, self._layers[name]):
                if isinstance(layer, torch.nn.Module):
                    layer.to("cpu")  # the plan says where it is needed
        return tuple(parts), {name: values[name] for name in self.names}

    def part(self, name: str, layers: tuple[FrozenLayer, ...]) -> FrozenPart:
        """As a plan has it, with these costs."""
        ranks = self._specs[name].ranks
        ranks = None if ranks is None else tuple(ranks)
        return FrozenPart(name=name, layers=layers, needs=self._needs[name], targets=self._targets[name], ranks=ranks)

    def check_planned(self, parts: Sequence[FrozenPart], where: str) -> None:
        """Raise a ConfigError for a plan's parts with other names, numbers of layers, or readers than these."""
        mine = {name: (len(self._layers[name]), self._needs[name], self._targets[name]) for name in self.names}
        found = {part.name: (len(part.layers), part.needs, part.targets) for part in parts}
        for name in (*mine, *found):
            if mine.get(name) != found.get(name):
                raise ConfigError(
                    f"{where}: frozen part {name!r}: expected (layers, needs, targets) "
                    f"{mine.get(name, 'of no such part')}, found {found.get(name, 'no such part')}; plan anew with "
                    "ds_pulse plan --frozen"
                )


def _check_owners(specs: Mapping[str, FrozenSpec], heads: Sequence[Head]) -> None:
    """With several backbones, raise a ConfigError for a part of none of them, or one that reads another's data."""
    names = [str(head.name) for head in heads if head.name is not None]
    for name, given in specs.items() if names else ():
        owner = next((one for one in names if name.startswith(f"{one}.")), None)
        if owner is None:
            known = ", ".join(f"{one}.{name.rpartition('.')[2]}" for one in names)
            raise ConfigError(f"frozen part {name!r}: expected the name of a backbone before it ({known})")
        if not given.input.startswith(f"{owner}."):
            raise ConfigError(
                f"frozen part {name!r}: input: expected an entry or a part of the same backbone "
                f"({owner}.{given.input.rpartition('.')[2]}), found {given.input!r}; backbones are independent"
            )


def _measured(
    frozen: FrozenLayers, index: int, hidden: Any, values: Mapping[str, Any], clock: DeviceClock
) -> tuple[FrozenLayer, Any]:
    """Costs of one layer, and what it gives: a median after a warm-up; at work it needs what it reads and gives."""
    run = partial(frozen.run, hidden, index, index + 1, values.__getitem__)
    result, times = run(), []
    for _ in range(_TIMED_RUNS):
        start = clock.mark()
        run()
        times.append(clock.mean_ms([(start, clock.mark())]))
    layer, function = frozen.layers[index]
    weights = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    names = layer.pop if index else (frozen.input, *layer.pop)
    read = [hidden, *(values[name] for name in dict.fromkeys(names))]
    output_bytes = num_bytes(tensors_in(result))
    costs = FrozenLayer(
        name=layer.name,
        forward_ms=statistics.median(times),
        param_bytes=num_bytes(weights),
        output_bytes=output_bytes,
        activation_bytes=sum(num_bytes(tensors_in(value)) for value in read) + output_bytes,
    )
    return costs, result


def _graph_of(name: str, layers: Sequence[Any]) -> Graph:
    if not layers:
        raise GraphError(f"frozen part {name!r}: expected at least one layer, found none")
    described = tuple(describe(index, layer) for index, layer in enumerate(layers))
    for layer in described:
        if layer.stash:
            raise GraphError(
                f"frozen part {name!r}: layer {layer.name} stashes {layer.stash[0]!r}; a part has one result, its last "
                "layer's output: hand on a tuple, or make another part"
            )
    return Graph(layers=described)


def _refuse_trainable(parts: Mapping[str, Sequence[Any]]) -> None:
    for name, layers in parts.items():
        for index, layer in enumerate(layers):
            bare = unwrap(layer)
            for parameter, value in bare.named_parameters() if isinstance(bare, torch.nn.Module) else ():
                if value.requires_grad:
                    raise GraphError(
                        f"frozen part {name!r}: parameter {parameter} of layer {describe(index, layer).name} is "
                        "trainable, and what runs without gradient cannot train; call requires_grad_(False) on the "
                        "encoder, or make it layers of the model"
                    )


def _check_dtypes(specs: Mapping[str, FrozenSpec], parts: Mapping[str, Sequence[Any]]) -> None:
    """Raise a ConfigError where two parts have a weight in common and cast it to different dtypes."""
    owners: dict[torch.Tensor, str] = {}
    for name, layers in parts.items():
        for bare in map(unwrap, layers):
            for weight, tensor in bare.named_parameters() if isinstance(bare, torch.nn.Module) else ():
                other = owners.setdefault(tensor, name)
                if specs[other].dtype != specs[name].dtype:
                    raise ConfigError(
                        f"frozen parts {other!r} and {name!r}: expected one dtype for {weight}, which both hold, found "
                        f"{specs[other].dtype} and {specs[name].dtype}; give both the same dtype, or one of them a "
                        "copy (copy.deepcopy)"
                    )


def _frozen(layer: Any, seed: int, device: torch.device, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Ready to run; weights that a ``LayerSpec`` draws are the same wherever it is built."""
    with same_random_numbers(device):
        torch.manual_seed(seed)
        function = built(layer)
    if isinstance(function, torch.nn.Module):
        return function.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return function


def check_same_weights(parts: Mapping[str, FrozenLayers], held: Collection[str]) -> None:
    """Raise a ConfigError where ranks that hold a part have other weights in it; collective over the world.

    Results come from whichever rank the plan names, so a part that each rank initialised anew would be many.
    """
    digests = everywhere(
        lambda: {name: [_digest(function) for _, function in parts[name].layers] for name in held},
        "comparing the weights of frozen parts",
        ConfigError,
    )
    told = told_by_all(digests)
    for name, part in parts.items():
        holders = [(rank, digests[name]) for rank, digests in enumerate(told) if name in digests]
        for rank, found in holders[1:]:
            first, expected = holders[0]
            index = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
            if index is not None:
                raise ConfigError(
                    f"frozen part {name!r}: expected the same weights on every rank, found others in layer "
                    f"{part.layers[index][0].name} on rank {rank} than on rank {first}; load them from one file, or "
                    "call torch.manual_seed with the same number on every rank before the part is built"
                )


def _digest(function: Callable[..., Any]) -> int:
    """Of some numbers of every parameter and kept buffer: enough to tell weights drawn from weights loaded.

    Quantised weights are tensors of classes of their own, of which many cannot be taken apart; those are left out.
    """
    found = 0
    for tensor in function.state_dict().values() if isinstance(function, torch.nn.Module) else ():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _DIGESTED)].cpu().contiguous()
            found = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), found)
    return found


def _nowhere(*_: Any) -> Any:
    raise AssertionError("a frozen layer that the plan runs on other ranks")
