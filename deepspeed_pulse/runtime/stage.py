"""One stage: a run of layers that passes a hidden state on, with the values it pops and stashes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_pulse.errors import GraphError, PulseError, RunError
from deepspeed_pulse.ir.graph import Layer


@dataclass(frozen=True)
class BoundLayer:
    """A layer's declaration and the function that runs it."""

    declared: Layer
    function: Callable[..., Any]


class Stage:
    """Runs layers in order.

    Args:
        layers: the stage's layers.
        exports: names stashed here that are needed outside the stage (on this rank or another).
    """

    def __init__(self, layers: Sequence[BoundLayer], exports: Sequence[str]) -> None:
        self._layers = tuple(layers)
        self.exports = tuple(exports)

    def run(self, hidden: Any, lookup: Callable[[str], Any]) -> tuple[Any, dict[str, Any]]:
        """Hidden state out, and the exported values by name.

        Args:
            hidden: input of the first layer, a tensor or a tuple of tensors.
            lookup: gives a popped value that was not stashed in this stage.
        """
        stashed: dict[str, Any] = {}
        for layer in self._layers:
            names = layer.declared.pop
            popped = [stashed[name] if name in stashed else lookup(name) for name in names]
            with naming(layer.declared):
                result = layer.function(hidden, *popped)
            hidden = self._unstash(layer.declared, result, stashed)
        return hidden, {name: stashed[name] for name in self.exports}

    @staticmethod
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
        return tensor

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
