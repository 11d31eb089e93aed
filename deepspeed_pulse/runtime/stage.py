"""One stage: a run of layers that passes a hidden state on, with the values it pops and stashes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_pulse.errors import GraphError, PulseError, RunError
from deepspeed_pulse.ir.graph import Layer
from deepspeed_pulse.runtime.payload import tensors_in
from deepspeed_pulse.runtime.replay import Checkpoint, non_reentrant, replayed

Lookup = Callable[[str], Any]


@dataclass(frozen=True)
class BoundLayer:
    """A layer's declaration and the function that runs it.

    ``recompute``: run again in backward instead of keeping activations. ``seed(number)``: called before the layer runs
    microbatch ``number``.
    """

    declared: Layer
    function: Callable[..., Any]
    recompute: bool = False
    seed: Callable[[int], None] | None = None


class Stage:
    """Runs layers in order.

    Args:
        layers: the stage's layers.
        exports: names stashed here that are needed outside the stage (on this rank or another).
        checkpoint: runs what is recomputed.
        interval: so many recomputed layers in a row keep one input.
    """

    def __init__(
        self,
        layers: Sequence[BoundLayer],
        exports: Sequence[str],
        *,
        checkpoint: Checkpoint = non_reentrant,
        interval: int = 1,
    ) -> None:
        self._runs = tuple(_Run(part) for part in _parts(layers, interval))
        self.exports = tuple(exports)
        self._checkpoint = checkpoint

    def run(
        self, hidden: Any, lookup: Lookup, *, number: int = 0, saved: SavedBytes | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Hidden state out, and the exported values by name.

        Args:
            hidden: input of the first layer, a tensor or a tuple of tensors.
            lookup: gives a popped value that was not stashed in this stage.
            number: of the microbatch, for layers that are seeded.
            saved: told what is kept for layers that run again.
        """
        stashed: dict[str, Any] = {}

        def find(name: str) -> Any:
            return stashed[name] if name in stashed else lookup(name)

        for run in self._runs:
            if run.recompute and torch.is_grad_enabled():
                hidden, more = run.replayed(self._checkpoint, hidden, find, number, saved)
            else:
                hidden, more = run(hidden, find, number)
            stashed.update(more)
        return hidden, {name: stashed[name] for name in self.exports}


def _parts(layers: Sequence[BoundLayer], interval: int) -> Iterator[Sequence[BoundLayer]]:
    """Layers that are kept, as many as follow one another, and ``interval`` at most that are recomputed."""
    for recompute, group in itertools.groupby(layers, key=lambda layer: layer.recompute):
        same = list(group)
        size = interval if recompute else len(same)
        for start in range(0, len(same), size):
            yield same[start : start + size]


class _Run:
    """Layers that run one after another, all recomputed together or none."""

    def __init__(self, layers: Sequence[BoundLayer]) -> None:
        self._layers = tuple(layers)
        self.recompute = layers[0].recompute
        made = {name for layer in layers for name in layer.declared.stash}
        popped = dict.fromkeys(name for layer in layers for name in layer.declared.pop)
        self._reads = tuple(name for name in popped if name not in made)
        self._stashes = tuple(name for layer in layers for name in layer.declared.stash)
        self._parameters = [
            p
            for layer in layers
            if callable(getattr(layer.function, "parameters", None))
            for p in layer.function.parameters()  # type: ignore[attr-defined]
        ]

    def __call__(self, hidden: Any, find: Lookup, number: int, *, again: bool = False) -> tuple[Any, dict[str, Any]]:
        """Hidden state out, and all that is stashed."""
        stashed: dict[str, Any] = {}
        for layer in self._layers:
            popped = [stashed[name] if name in stashed else find(name) for name in layer.declared.pop]
            if layer.seed is not None:
                layer.seed(number)
            # Checkpointing ends a second run early by an exception of its own.
            with nullcontext() if again else naming(layer.declared):
                result = layer.function(hidden, *popped)
            hidden = _unstash(layer.declared, result, stashed)
        return hidden, stashed

    def replayed(
        self, checkpoint: Checkpoint, hidden: Any, find: Lookup, number: int, saved: SavedBytes | None
    ) -> tuple[Any, dict[str, Any]]:
        """The same, keeping the input and what is popped until backward runs the layers again."""

        def run(values: Sequence[Any], again: bool) -> Sequence[Any]:
            first, *popped = values
            given = dict(zip(self._reads, popped, strict=True))
            output, stashed = self(first, given.__getitem__, number, again=again)
            return [output, *(stashed[name] for name in self._stashes)]

        values = [hidden, *map(find, self._reads)]
        if saved is not None:
            saved.add(tensors_in(hidden))
        names = ", ".join(layer.declared.name for layer in self._layers)
        output, *more = replayed(checkpoint, run, values, self._parameters, names)
        return output, dict(zip(self._stashes, more, strict=True))


def _unstash(layer: Layer, result: Any, stashed: dict[str, Any]) -> Any:
    if not layer.stash:
        return result
    expected = 1 + len(layer.stash)
    if not isinstance(result, tuple) or len(result) != expected:
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise GraphError(
            f"layer {layer.name} stashes {', '.join(map(repr, layer.stash))}: expected it to return a tuple of "
            f"{expected} (output, {', '.join(layer.stash)}), found {found}"
        )
    hidden, *values = result
    stashed.update(zip(layer.stash, values, strict=True))
    return hidden


@contextmanager
def naming(layer: Layer) -> Iterator[None]:
    """Say in which layer an exception happened."""
    try:
        yield
    except PulseError:
        raise
    except Exception as problem:
        hint = ""
        if "leaf Variable that requires grad" in str(problem):
            hint = "; a stage's first layer may not change its input in place: use the out-of-place operation there"
        raise RunError(f"layer {layer.name}: {type(problem).__name__}: {problem}{hint}") from problem


class SavedBytes:
    """Counts the bytes autograd keeps for backward, each storage once, parameters excluded."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        # Not by address: on the meta device all storages have the same.
        self._seen = {StorageWeakRef(p.untyped_storage()) for p in parameters}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.bytes = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are kept too, for another reason."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = StorageWeakRef(storage)
            if key not in self._seen:
                self._seen.add(key)
                self.bytes += storage.nbytes()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.add([tensor])
        # Without its graph: an output that keeps itself, graph and parameters included, would never be freed.
        return tensor.detach()

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
