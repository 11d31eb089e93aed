"""Measuring what each layer costs, one layer at a time, so that the model need not fit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.profile import LayerCost
from deepspeed_pulse.runtime.payload import num_bytes
from deepspeed_pulse.runtime.stage import BoundLayer, SavedBytes, Stage

_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs of all layers; ``value_bytes``: per named value its bytes and whether it has a gradient."""

    layers: tuple[LayerCost, ...]
    value_bytes: dict[str, tuple[int, bool]]
    dtype: str


def measure_layers(
    graph: Graph,
    build: Sequence[Callable[[], Any]],
    inputs: Any,
    entries: Mapping[str, Any],
    device: torch.device,
    synchronize: Callable[[], None] = lambda: None,
) -> Measured:
    """Run every layer forward and backward on one batch; medians of a few repeats after a warm-up.

    Args:
        graph: declarations of the layers.
        build: per layer, makes it; a layer is dropped before the next is made.
        inputs, entries: the first layer's input and the batch entries.
        device: where to measure.
        synchronize: waits for the device before the clock is read.
    """
    hidden: Any = _map(inputs, lambda t: t.to(device))
    values: dict[str, Any] = {name: _map(value, lambda t: t.to(device)) for name, value in entries.items()}
    costs: list[LayerCost] = []
    value_bytes: dict[str, tuple[int, bool]] = {}
    dtype = "float32"
    # The random state is put back: measuring must not change the run that follows.
    with torch.random.fork_rng(devices=[]):
        for declared, make in zip(graph.layers, build, strict=True):
            layer = make()
            module = getattr(layer, "module", layer)
            home, buffers = _visit(module, device)
            missing = [name for name in declared.pop if name not in values]
            if missing:
                raise BatchError(
                    f"layer {declared.name} pops {missing[0]!r}, which no layer stashes and example_batch does not "
                    f"have; its entries are: {', '.join(sorted(entries)) or 'none'}"
                )
            probe = _Probe(BoundLayer(declared, layer), hidden, values, synchronize)
            cost, hidden, stashed = probe.measure()
            costs.append(cost)
            values.update(stashed)
            for name, value in stashed.items():
                tensors = _tensors(value)
                value_bytes[name] = (num_bytes(tensors), any(t.requires_grad for t in tensors))
            dtype = probe.dtype or dtype
            if home is not None:
                module.to(home)
                for buffer, saved in buffers:
                    buffer.data = saved.to(home)
    return Measured(layers=tuple(costs), value_bytes=value_bytes, dtype=dtype)


def _visit(module: Any, device: torch.device) -> tuple[torch.device | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Move a module to ``device``; where it came from, and copies of its buffers (running statistics)."""
    if not isinstance(module, torch.nn.Module):
        return None, []
    tensors = [*module.parameters(), *module.buffers()]
    home = tensors[0].device if tensors else device
    module.to(device)
    return home, [(buffer, buffer.detach().clone()) for buffer in module.buffers()]


class _Probe:
    """One layer between its inputs and outputs, cut off from its neighbours."""

    def __init__(self, layer: BoundLayer, hidden: Any, values: Mapping[str, Any], synchronize: Any) -> None:
        self._declared = layer.declared
        self._stage = Stage([layer], layer.declared.stash)
        self._hidden, self._values, self._synchronize = hidden, values, synchronize
        parameters = getattr(layer.function, "parameters", None)
        self._parameters = list(parameters()) if callable(parameters) else []
        floating = [p.dtype for p in self._parameters if p.is_floating_point()]
        self.dtype = str(floating[0]).removeprefix("torch.") if floating else None

    def measure(self) -> tuple[LayerCost, Any, dict[str, Any]]:
        before = [(p, p.grad) for p in self._parameters]
        times = [self._once() for _ in range(_REPEATS + 1)][1:]
        with SavedBytes(self._parameters) as saved:
            output, stashed = self._run()
        for parameter, gradient in before:
            parameter.grad = gradient
        if not all(isinstance(t, torch.Tensor) for t in _tensors(output)):
            raise GraphError(f"layer {self._declared.name} returned {type(output).__name__}, expected tensors")
        cost = LayerCost(
            name=self._declared.name,
            forward_ms=statistics.median(f for f, _ in times),
            backward_ms=statistics.median(b for _, b in times),
            param_bytes=num_bytes(self._parameters),
            activation_bytes=saved.bytes,
            output_bytes=num_bytes(_tensors(output)),
        )
        return cost, _map(output, _cut), {name: _map(value, _cut) for name, value in stashed.items()}

    def _run(self) -> tuple[Any, dict[str, Any]]:
        leaves = {name: _map(self._values[name], _cut) for name in self._declared.pop}
        return self._stage.run(_map(self._hidden, _cut), lambda name: leaves[name])

    def _once(self) -> tuple[float, float]:
        self._synchronize()
        start = time.perf_counter()
        output, stashed = self._run()
        self._synchronize()
        middle = time.perf_counter()
        roots = [t for value in (output, *stashed.values()) for t in _tensors(value) if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        self._synchronize()
        return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value) if isinstance(value, (tuple, list)) else []


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return tuple(_map(item, change) for item in value)
    return value
