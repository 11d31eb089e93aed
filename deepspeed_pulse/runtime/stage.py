"""One stage: a run of layers that passes a hidden state on, with the values it pops and stashes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_pulse.errors import GraphError, PulseError, RunError, add_note
from deepspeed_pulse.ir.effects import INPUT, Argument, Effects, Version, changed_from_outside
from deepspeed_pulse.ir.graph import Layer
from deepspeed_pulse.runtime.owning import copied
from deepspeed_pulse.runtime.payload import as_payload, tensors_in
from deepspeed_pulse.runtime.recomputing import Checkpoint, RunLater, non_reentrant, recomputed
from deepspeed_pulse.runtime.settling import found_again
from deepspeed_pulse.runtime.tape import Tape

Lookup = Callable[[str], Any]


@dataclass(frozen=True)
class BoundLayer:
    """A layer's declaration and the function that runs it.

    ``recompute``: run again in backward instead of keeping activations. ``seed(number)``: called before the layer runs
    microbatch ``number``. ``effects``: what it changes in place; None where that is not known.
    """

    declared: Layer
    function: Callable[..., Any]
    recompute: bool = False
    seed: Callable[[int], None] | None = None
    effects: Effects | None = None


class Stage:
    """Runs layers in order.

    Args:
        layers: the stage's layers.
        exports: names stashed here that are needed outside the stage (on this rank or another).
        checkpoint: runs what is recomputed.
        interval: so many recomputed layers in a row keep one input.

    Attributes:
        parameters: of its layers.
        changes: names of what the stage reads from outside and changes in place; :data:`INPUT` for its input, of which
            whoever runs the stage gives it one of its own.
    """

    def __init__(
        self,
        layers: Sequence[BoundLayer],
        exports: Sequence[str],
        *,
        checkpoint: Checkpoint = non_reentrant,
        interval: int = 1,
    ) -> None:
        self._runs = _segments(layers, interval, together=True)
        self._cuts = all(layer.effects is not None and layer.effects.leaves_alone for layer in layers)
        self._pieces = _segments(layers, interval, together=False) if self._cuts else self._runs
        """What runs where a backward in halves follows; each has a graph of its own where no layer changes values."""
        self.changes = _changes(layers, ())
        self.parameters = [p for run in self._runs for p in run.parameters]
        self.exports = tuple(exports)
        self._checkpoint = checkpoint
        self.last = self._runs[-1].last
        """Name of the last layer."""

    def run(
        self,
        hidden: Any,
        lookup: Lookup,
        *,
        number: int = 0,
        saved: SavedBytes | None = None,
        tape: Tape | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Hidden state out, and the exported values by name.

        Args:
            hidden: input of the first layer, a tensor or a tuple of tensors.
            lookup: gives a popped value that was not stashed in this stage.
            number: of the microbatch, for layers that are seeded.
            saved: told what is kept for layers that run again.
            tape: where a backward in halves follows, takes what that needs; it knows what ``hidden`` was made of.
        """
        stashed: dict[str, Any] = {}
        cut = tape if self._cuts else None

        def find(name: str) -> Any:
            value = stashed[name] if name in stashed else lookup(name)
            if tape is not None and (self._cuts or name not in stashed):
                tape.reads(tensors_in(value))
            if name not in stashed and name in self.changes:
                value = stashed[name] = copied(value)
            return value

        segments = self._runs if tape is None else self._pieces
        for position, run in enumerate(segments):
            if position:
                hidden = as_payload(hidden, f"layer {segments[position - 1].last} returned")
            if cut is not None and position:
                hidden = cut.go_on(hidden)
            if run.recompute and torch.is_grad_enabled():
                checkpoint = self._checkpoint if tape is None else self._for_halves(tape)
                hidden, more = run.recomputed(checkpoint, hidden, find, number, saved)
            else:
                hidden, more = run(hidden, find, number)
            stashed.update(more if cut is None else {name: cut.stash(name, value) for name, value in more.items()})
        if cut is not None and segments[-1].recompute:
            hidden = cut.go_on(as_payload(hidden, f"layer {self.last} returned"))
        if tape is not None and not self._cuts:
            stashed.update({name: tape.stash(name, stashed[name]) for name in self.exports})
        return hidden, {name: stashed[name] for name in self.exports}

    def _for_halves(self, tape: Tape) -> Checkpoint:
        """The checkpoint function of a piece; with one of the user's, or changes in place, it stays whole."""
        if not self._cuts or self._checkpoint is not non_reentrant:
            tape.keep_whole()
            return self._checkpoint
        later = RunLater()
        tape.run_later(later)
        return later


def _segments(layers: Sequence[BoundLayer], interval: int, *, together: bool) -> tuple[_Segment, ...]:
    """``together``: layers that are kept, as many as follow one another."""
    parts = list(_parts(layers, interval, together=together))
    return tuple(
        _Segment(part, [layer for others in parts[number + 1 :] for layer in others])
        for number, part in enumerate(parts)
    )


def _parts(layers: Sequence[BoundLayer], interval: int, *, together: bool) -> Iterator[Sequence[BoundLayer]]:
    """Layers that are kept, all that follow one another or each for itself, and ``interval`` recomputed at most."""
    for recompute, group in itertools.groupby(layers, key=lambda layer: layer.recompute):
        same = list(group)
        size = interval if recompute else len(same) if together else 1
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _changes(layers: Sequence[BoundLayer], later: Sequence[BoundLayer]) -> frozenset[str]:
    """What ``layers`` read from outside and change, or ``later`` ones do."""
    effects, after = [layer.effects for layer in layers], [layer.effects for layer in later]
    if None in effects or None in after:
        return frozenset()
    made: set[str] = set()
    arguments = []
    for position, layer in enumerate(layers):
        popped = ["" if name in made else name for name in layer.declared.pop]
        arguments.append(["" if position else INPUT, *popped])
        made.update(layer.declared.stash)
    return changed_from_outside(effects, arguments, until=after)  # type: ignore[arg-type]


class _Segment:
    """Layers that run one after another, all recomputed together or none.

    Args:
        layers: these.
        later: the layers of the stage after them, which may change what these have read.
    """

    def __init__(self, layers: Sequence[BoundLayer], later: Sequence[BoundLayer]) -> None:
        self._layers = tuple(layers)
        self.recompute = layers[0].recompute
        self.last = layers[-1].declared.name
        made = {name for layer in layers for name in layer.declared.stash}
        popped = dict.fromkeys(name for layer in layers for name in layer.declared.pop)
        self._reads = tuple(name for name in popped if name not in made)
        self._stashes = tuple(name for layer in layers for name in layer.declared.stash)
        self.parameters = [
            p
            for layer in layers
            if callable(getattr(layer.function, "parameters", None))
            for p in layer.function.parameters()  # type: ignore[attr-defined]
        ]
        self._changes = _changes(layers, later) if self.recompute else frozenset()
        self._buffers = [
            (module, layer.effects.buffers)
            for layer in layers
            if layer.effects is not None and layer.effects.buffers
            for module in (module_of(layer.function),)
            if module is not None
        ]

    def __call__(self, hidden: Any, find: Lookup, number: int) -> tuple[Any, dict[str, Any]]:
        """Hidden state out, and all that is stashed."""
        stashed: dict[str, Any] = {}
        for position, layer in enumerate(self._layers):
            if position:
                hidden = as_payload(hidden, f"layer {self._layers[position - 1].declared.name} returned")
            popped = [stashed[name] if name in stashed else find(name) for name in layer.declared.pop]
            if layer.seed is not None:
                layer.seed(number)
            with naming(layer.declared):
                hidden = _called(layer, (hidden, *popped), stashed)
        return hidden, stashed

    def recomputed(
        self, checkpoint: Checkpoint, hidden: Any, find: Lookup, number: int, saved: SavedBytes | None
    ) -> tuple[Any, dict[str, Any]]:
        """The same, keeping the input and what is popped until backward runs the layers again."""
        names = (INPUT, *self._reads)
        before: list[dict[str, torch.Tensor]] = []

        def run(values: Sequence[Any], again: bool) -> Sequence[Any]:
            first, *popped = self._own(names, values)
            given = dict(zip(self._reads, popped, strict=True))
            if not again:
                before.extend(self._snapshot())
            with self._with_buffers(before if again else ()):
                output, stashed = self(first, given.__getitem__, number)
            return [output, *(stashed[name] for name in self._stashes)]

        values = self._own(names, [hidden, *map(find, self._reads)])
        if saved is not None:
            saved.add(tensors_in(values[0]))
        layers = ", ".join(layer.declared.name for layer in self._layers)
        output, *more = recomputed(checkpoint, run, values, self.parameters, layers)
        return output, dict(zip(self._stashes, more, strict=True))

    def _own(self, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """What is changed in place is kept as it was: layers get copies, in forward and when they run again."""
        return [copied(value) if name in self._changes else value for name, value in zip(names, values, strict=True)]

    def _snapshot(self) -> list[dict[str, torch.Tensor]]:
        return [{name: module.get_buffer(name).clone() for name in names} for module, names in self._buffers]

    @contextmanager
    def _with_buffers(self, before: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[None]:
        """Run with buffers as they were at the first run, and leave no trace: running statistics count once."""
        now = [(module, {name: module.get_buffer(name) for name in names}) for module, names in self._buffers]
        for (module, _), saved in zip(self._buffers, before, strict=False):
            put_buffers(module, {name: buffer.clone() for name, buffer in saved.items()})
        try:
            yield
        finally:
            for module, buffers in now if before else ():
                put_buffers(module, buffers)


def _called(layer: BoundLayer, arguments: Sequence[Any], stashed: dict[str, Any]) -> Any:
    """Hidden state out; what is stashed is added, versions of values that the layer changed included."""
    known = layer.effects
    if known is not None and known.aliases:
        arguments = _as_one(arguments, known.aliases)
    before = [] if known is None or known.changes else versions_of(arguments)
    if known is not None and known.weights:
        module = module_of(layer.function)
        assert module is not None
        with found_again([module.get_parameter(name) for name in known.weights]):
            result = layer.function(*arguments)
    else:
        result = layer.function(*arguments)
    if known is None:
        return unstash(layer.declared, result, stashed)
    if not known.changes and versions_of(arguments) != before:
        raise RunError(
            f"layer {layer.declared.name} changed its input in place now and did not in the first microbatch, so "
            "nobody was prepared for it; use the out-of-place operation",
            more="in-place",
        )
    hidden = unstash(layer.declared, result, stashed, len(known.versions))
    fresh = layer.declared.stash[len(layer.declared.stash) - len(known.versions) :]
    stashed.update(zip(fresh, (_changed(version, arguments) for version in known.versions), strict=True))
    return hidden


def _as_one(arguments: Sequence[Any], aliases: Sequence[tuple[Argument, Argument]]) -> list[Any]:
    """Arguments with one tensor for those that stand for the same."""
    found = list(arguments)
    for place, main in aliases:
        value, tensor = found[place.index], _tensor(found, main)
        if isinstance(value, torch.Tensor):
            found[place.index] = tensor
        else:
            found[place.index] = tuple(tensor if t == place.tensor else item for t, item in enumerate(value))
    return found


def _tensor(arguments: Sequence[Any], place: Argument) -> torch.Tensor:
    tensor = tensors_in(arguments[place.index])[place.tensor]
    return tensor.detach() if place.detached else tensor


def _changed(version: Version, arguments: Sequence[Any]) -> Any:
    tensors = tuple(_tensor(arguments, place) for place in version.tensors)
    return tensors if version.is_tuple else tensors[0]


def unstash(layer: Layer, result: Any, stashed: dict[str, Any], num_versions: int = 0) -> Any:
    """What a layer returned as the hidden state; its values are added to ``stashed``.

    ``num_versions``: so many of the names it stashes are not returned.

    Raises:
        GraphError: it returned something else than it declares.
    """
    names = layer.stash[: len(layer.stash) - num_versions]
    if not names:
        return result
    expected = 1 + len(names)
    if not isinstance(result, tuple) or len(result) != expected:
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise GraphError(
            f"layer {layer.name} stashes {', '.join(map(repr, names))}: expected it to return a tuple of "
            f"{expected} (output, {', '.join(names)}), found {found}"
        )
    hidden, *values = result
    for name, value in zip(names, values, strict=True):
        stashed[name] = as_payload(value, f"layer {layer.name} stashed {name!r}")
    return hidden


def versions_of(values: Sequence[Any]) -> list[int]:
    """How often each tensor among ``values`` has been changed in place."""
    return [0 if t.is_inference() else t._version for value in values for t in tensors_in(value)]


def module_of(function: Any) -> torch.nn.Module | None:
    """The module that a layer calls; None for a plain function."""
    if isinstance(function, torch.nn.Module):
        return function
    module = getattr(function, "module", None)
    return module if isinstance(module, torch.nn.Module) else None


def put_buffers(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Give a module these buffers, by qualified name."""
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer


@contextmanager
def naming(layer: Layer) -> Iterator[None]:
    """Say in which layer an exception happened; it keeps its class."""
    try:
        yield
    except PulseError:
        raise
    except Exception as problem:
        add_note(problem, f"in layer {layer.name}")
        raise


class SavedBytes:
    """Counts the bytes autograd keeps for backward, each storage once.

    Args:
        counted: parameters, and what is held and counted in another place.
    """

    def __init__(self, counted: Sequence[torch.Tensor]) -> None:
        # Not by address: on the meta device all storages have the same.
        self._seen = {StorageWeakRef(tensor.untyped_storage()): 0 for tensor in counted}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpacked)
        self.bytes = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are kept too, for another reason."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = StorageWeakRef(storage)
            if key not in self._seen:
                self._seen[key] = storage.nbytes()
                self.bytes += storage.nbytes()

    def of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Of the bytes, those of ``tensors``."""
        return sum(self._seen.get(key, 0) for key in {StorageWeakRef(t.untyped_storage()) for t in tensors})

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.add([tensor])
        # Without its graph: an output that keeps itself, graph and parameters included, would never be freed.
        return tensor.detach(), tensor._version

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)


def _unpacked(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """As autograd does without hooks: what was changed in place since it was saved gives no gradient."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype}, shape {list(tensor.shape)}] is at version {tensor._version}; expected version {version}"
        )
    return tensor
