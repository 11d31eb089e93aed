"""One layer at a time, cut off from its neighbours, so that the model need not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.effects import INPUT
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.owning import copied, cut_off
from deepspeed_pulse.runtime.payload import as_payload, map_tensors, num_bytes, tensors_in
from deepspeed_pulse.runtime.roots import roots_of
from deepspeed_pulse.runtime.stage import BoundLayer, SavedBytes, Stage, module_of, naming, put_buffers, versions_of
from deepspeed_pulse.runtime.tape import Tape


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward of a layer: the leaves it read, these or copies as they were given to it, its output and stashes.

    ``tape``: for a backward in halves.
    """

    read: tuple[torch.Tensor, ...]
    given: tuple[torch.Tensor, ...]
    output: Any
    stashed: dict[str, Any]
    tape: Tape | None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that a layer keeps for backward, what it stashes included; without what it read and stashes; its output.

    ``unkept_output_bytes``: of its output, what is not among what it keeps.
    """

    activation_bytes: int
    rerun_bytes: int
    output_bytes: int
    unkept_output_bytes: int


class Probe:
    """A layer that can be run again and again on the same input."""

    def __init__(self, layer: BoundLayer, hidden: Any, values: Mapping[str, Any]) -> None:
        self._declared = layer.declared
        self._stage = Stage([layer], layer.declared.stash)
        self._hidden, self._values = hidden, values
        self._changes = frozenset((INPUT, *layer.declared.pop))
        """What the layer may change in place, so that each run gets a copy; what it does not is known after one run."""
        self._last: Pass | None = None
        parameters = getattr(layer.function, "parameters", None)
        self.parameters: list[torch.Tensor] = list(parameters()) if callable(parameters) else []
        self._gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None  # or backward would add into it

    @property
    def name(self) -> str:
        return self._declared.name

    @property
    def dtype(self) -> str | None:
        """Of the first floating parameter; None without one."""
        floating = [p.dtype for p in self.parameters if p.is_floating_point()]
        return str(floating[0]).removeprefix("torch.") if floating else None

    def run(self, *, in_halves: bool = False) -> Pass:
        """One forward, on leaves of its own."""
        hidden = map_tensors(self._hidden, cut_off)
        popped = {name: map_tensors(self._values[name], cut_off) for name in self._declared.pop}
        given = {
            name: copied(value) if name in self._changes else value for name, value in {**popped, INPUT: hidden}.items()
        }
        before = {name: versions_of([given[name]]) for name in self._changes}
        read = tuple(t for value in (hidden, *popped.values()) for t in tensors_in(value))
        tape = Tape(read) if in_halves else None
        output, stashed = self._stage.run(given[INPUT], given.__getitem__, tape=tape)
        self._changes = frozenset(name for name, versions in before.items() if versions_of([given[name]]) != versions)
        own = tuple(t for value in given.values() for t in tensors_in(value))
        self._last = Pass(read=read, given=own, output=output, stashed=stashed, tape=tape)
        return self._last

    def first_run(self) -> Kept:
        """The same, counted."""
        with SavedBytes(self.parameters) as saved:
            run = self.run()
        rerun_bytes = saved.bytes - saved.of(run.given)
        for value in run.stashed.values():
            saved.add(tensors_in(value))
        activation_bytes = saved.bytes
        saved.add(tensors_in(run.output))
        return Kept(
            activation_bytes=activation_bytes,
            rerun_bytes=rerun_bytes,
            output_bytes=num_bytes(tensors_in(run.output)),
            unkept_output_bytes=saved.bytes - activation_bytes,
        )

    def backward(self, *, inputs_only: bool = False) -> None:
        """Backward of the last run, from everything the layer gave.

        ``inputs_only``: gradients of what the layer read, not of its weights; the graph is kept.
        """
        assert self._last is not None
        given = (self._last.output, *self._last.stashed.values())
        roots = [t for value in given for t in tensors_in(value) if t.requires_grad]
        wanted = [t for t in self._last.read if t.requires_grad]
        if not roots or (inputs_only and not wanted):
            return
        options: dict[str, Any] = {"inputs": wanted, "retain_graph": True} if inputs_only else {}
        with naming(self._declared):
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots], **options)

    def input_half(self) -> None:
        """Of a backward of the last run, which was one for halves, from everything the layer gave."""
        assert self._last is not None and self._last.tape is not None
        tape = self._last.tape
        for name, value in self._last.stashed.items():
            tape.add_gradients(name, [torch.ones_like(t) for t in tensors_in(value)])
        roots = [t for t in tensors_in(self._last.output) if t.requires_grad]
        with naming(self._declared):
            tape.input_half([r for r in roots_of(roots) if r], [torch.ones_like(t) for t in roots], nullcontext)

    def late_bytes(self) -> int:
        """Of gradients that :meth:`input_half` has kept for the other half."""
        assert self._last is not None and self._last.tape is not None
        return self._last.tape.late_bytes()

    def weight_half(self) -> None:
        """What :meth:`input_half` has left."""
        assert self._last is not None and self._last.tape is not None
        with naming(self._declared):
            self._last.tape.weight_half(nullcontext)

    def forget(self) -> None:
        """Free what the last run gave."""
        self._last = None

    def put_back(self) -> None:
        """Parameters get back the gradients they had."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def leave(self) -> tuple[Any, dict[str, Any]]:
        """What the next layers read, from the last run.

        The probe lets go of the layer: whoever took it may hold it until the next layer is made.
        """
        assert self._last is not None
        stashed = {name: map_tensors(value, cut_off) for name, value in self._last.stashed.items()}
        output = map_tensors(self._last.output, cut_off)
        del self._stage, self._last, self.parameters, self._gradients
        return output, stashed


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What a layer of the list finds: the hidden state, and the values that it or a later layer pops.

    ``later``: what the first layers of further backbones find instead of a hidden state, by index.
    """

    hidden: Any
    values: dict[str, Any]
    later: Mapping[int, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> LayerInputs:
        """The same on another device."""
        values = {name: moved(value, device) for name, value in self.values.items()}
        later = {index: moved(value, device) for index, value in self.later.items()}
        return LayerInputs(hidden=moved(self.hidden, device), values=values, later=later)


def moved(value: Any, device: torch.device) -> Any:
    """A value on another device, cut off from what made it; leaves stay leaves."""
    return map_tensors(value, lambda tensor: tensor.detach().to(device).requires_grad_(tensor.requires_grad))


class Visits:
    """Visits the layers of a graph in order, each with what the ones before it gave.

    ``build``: per layer, makes it; a layer is dropped before the next is made. ``start``: what the first visited layer
    finds: the batch, or what an earlier walk has reached. ``layers``: indices of those to visit, one after the other;
    None for all.
    """

    def __init__(
        self,
        graph: Graph,
        build: Sequence[Callable[[], Any]],
        start: LayerInputs,
        device: torch.device,
        layers: range | None = None,
    ) -> None:
        self._graph, self._build, self._device = graph, build, device
        self._layers = range(len(graph.layers)) if layers is None else layers
        self._names = tuple(sorted(start.values))
        self._last_use = {v.name: v.targets[-1] for v in (*graph.values, *graph.batch_entries)}
        self.reached = start.to(device)
        """What the layer after the last one visited finds."""
        self.dtype: str | None = None
        """Of the last layer with a floating parameter; None without one."""
        self.value_bytes: dict[str, tuple[int, bool]] = {}
        """Per stashed value its bytes and whether it has a gradient."""

    def __iter__(self) -> Iterator[Probe]:
        """A probe for each layer; whoever takes it runs it at least once."""
        for index in self._layers:
            layer = self._build[index]()
            self._begin_backbone(index)
            with _on(module_of(layer), self._device):
                probe = self._probe(index, layer)
                try:
                    yield probe
                finally:
                    probe.put_back()
                self.dtype = probe.dtype or self.dtype
                hidden, stashed = probe.leave()
                if not self._graph.is_last(index):
                    hidden = as_payload(hidden, f"layer {self._graph.layers[index].name} returned")
                self._reach(index, hidden, stashed)
            del layer, probe, hidden, stashed

    def _begin_backbone(self, index: int) -> None:
        if index in self.reached.later:
            self.reached = replace(self.reached, hidden=self.reached.later[index])

    def _reach(self, index: int, hidden: Any, stashed: Mapping[str, Any]) -> None:
        for name, value in stashed.items():
            tensors = tensors_in(value)
            self.value_bytes[name] = (num_bytes(tensors), any(t.requires_grad for t in tensors))
        values = {**self.reached.values, **stashed}
        needed = {name: value for name, value in values.items() if self._last_use.get(name, -1) > index}
        self.reached = replace(self.reached, hidden=hidden, values=needed)

    def _probe(self, index: int, layer: Any) -> Probe:
        declared = self._graph.layers[index]
        missing = [name for name in declared.pop if name not in self.reached.values]
        if missing:
            raise BatchError(
                f"layer {declared.name} pops {missing[0]!r}, which no layer stashes and example_batch does not "
                f"have; its entries are: {', '.join(self._names) or 'none'}"
            )
        return Probe(BoundLayer(declared, layer), self.reached.hidden, self.reached.values)


def reach(
    graph: Graph, build: Sequence[Callable[[], Any]], start: LayerInputs, device: torch.device, layers: range
) -> LayerInputs:
    """Run layers forward once; what the layer after them finds, on the CPU."""
    walk = Visits(graph, build, start, device, layers)
    for probe in walk:
        probe.run()
    return walk.reached.to(torch.device("cpu"))


@contextmanager
def _on(module: torch.nn.Module | None, device: torch.device) -> Iterator[None]:
    """A module on ``device``, in training mode, as it will run there.

    It goes back to where it came from, with the mode, the weights and the buffers (running statistics) it had.
    """
    if module is None:
        yield
        return
    home = next((t.device for t in (*module.parameters(), *module.buffers())), device)
    # the tensors themselves, too: on another device a module has new ones
    before = {name: (t, t.detach().clone()) for name, t in module.named_buffers(remove_duplicate=False)}
    weights = [_Weight.of(part, name, p, device) for part in module.modules() for name, p in _own_weights(part)]
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.to(device).train()
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for weight in weights:
            weight.put_back()
        module.to(home)  # what else the module moves; its weights are there again, and are not copied
        for buffer, saved in before.values():
            buffer.data = saved
        put_buffers(module, {name: buffer for name, (buffer, _) in before.items()})


def _own_weights(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


@dataclass(frozen=True)
class _Weight:
    """A parameter as it was in its module. ``numbers``: a copy of those that a layer might change where it lies."""

    owner: torch.nn.Module
    name: str
    parameter: torch.nn.Parameter
    data: torch.Tensor
    version: Any
    numbers: torch.Tensor | None

    @classmethod
    def of(cls, owner: torch.nn.Module, name: str, parameter: torch.nn.Parameter, device: torch.device) -> _Weight:
        numbers = parameter.detach().clone() if parameter.device == device else None
        return cls(owner, name, parameter, parameter.data, versions_of([parameter]), numbers)

    def put_back(self) -> None:
        changed = versions_of([self.parameter]) != self.version
        self.owner._parameters[self.name] = self.parameter
        self.parameter.data = self.data
        if changed and self.numbers is not None:
            self.data.copy_(self.numbers)
