"""One stage's forward of one microbatch in pieces, each with a graph of its own.

So a backward in halves looks at one layer's graph at a time: what autograd does for a layer's weights takes as long as
the graph below them is large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_pulse.runtime.halves import WeightHalf, input_half
from deepspeed_pulse.runtime.owning import cut_off
from deepspeed_pulse.runtime.payload import Payload, map_tensors, tensors_of
from deepspeed_pulse.runtime.recomputing import RunLater
from deepspeed_pulse.runtime.roots import Root, roots_of

Accumulating = Callable[[], AbstractContextManager[None]]
"""Entered around what adds to gradients of weights."""


@dataclass
class _Piece:
    """Layers with one graph.

    ``read``: leaves that a gradient goes to. ``given``: roots in the graph, and for each the leaf that stands for it in
    later pieces and collects its gradient. ``whole``: its backward cannot run in halves. ``later``: the graph is made
    when backward begins; roots are those of the forward.
    """

    whole: bool = False
    read: list[torch.Tensor] = field(default_factory=list)
    given: list[tuple[Root, torch.Tensor]] = field(default_factory=list)
    later: RunLater | None = None

    def backward(self, roots: Sequence[Root], gradients: Sequence[torch.Tensor | None]) -> _Backward:
        """From these and from what later pieces have read."""
        used = [(root, leaf.grad) for root, leaf in self.given if leaf.grad is not None]
        for _, leaf in self.given:
            leaf.grad = None  # the leaf stays in the graph of the piece that read it
        if self.later is not None and used:
            again = self.later.again()
            used = [(again[root.node, root.output_nr], gradient) for root, gradient in used]
        return _Backward([*roots, *(root for root, _ in used)], [*gradients, *(gradient for _, gradient in used)])


@dataclass
class _Backward:
    roots: list[Root]
    gradients: list[torch.Tensor | None]


class Tape:
    """What a forward leaves for a backward in two halves. ``read``: leaves that the stage's input was made of."""

    def __init__(self, read: Sequence[torch.Tensor]) -> None:
        self._pieces: list[_Piece] = [_Piece()]
        self._stashed: dict[str, tuple[torch.Tensor, ...]] = {}
        self._late: list[WeightHalf] = []
        self.reads(read)

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """The piece reads these from outside."""
        self._pieces[-1].read += [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]

    def keep_whole(self) -> None:
        """The piece has a graph that can be gone through once only."""
        self._pieces[-1].whole = True

    def run_later(self, later: RunLater) -> None:
        """The piece's layers run again in backward."""
        self._pieces[-1].later = later

    def go_on(self, hidden: Payload) -> Payload:
        """The next piece, and its input."""
        hidden = self._cut(hidden)
        self._pieces.append(_Piece())
        self.reads(tensors_of(hidden))
        return hidden

    def _cut(self, value: Payload) -> Payload:
        """What the piece gave, cut off from its graph for whoever reads it."""
        piece = self._pieces[-1]

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            found = cut_off(tensor)
            (root,) = roots_of([tensor])
            if root is not None:
                piece.given.append((root, found))
            return found

        return map_tensors(value, leaf)  # type: ignore[no-any-return]

    def stash(self, name: str, value: Payload) -> Payload:
        """The same of a named value, whose gradient may also come from outside (:meth:`add_gradients`)."""
        found = self._cut(value)
        self._stashed[name] = tensors_of(found)
        return found

    def leaves(self) -> list[torch.Tensor]:
        """What pieces gave to later ones: the graphs of those keep it, also where no backward needs it."""
        return [leaf for piece in self._pieces for _, leaf in piece.given]

    def add_gradients(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        """What readers outside the stage give for a value that was stashed in it."""
        for leaf, gradient in zip(self._stashed[name], gradients, strict=True):
            if gradient is not None and leaf.requires_grad:
                leaf.grad = gradient

    def input_half(
        self, roots: Sequence[Root], gradients: Sequence[torch.Tensor | None], accumulating: Accumulating
    ) -> None:
        """Gradients of all that the stage read, from those of what its last piece gave."""
        for piece in reversed(self._pieces):
            found = piece.backward(roots, gradients)
            roots, gradients = (), ()
            late = None if piece.whole else input_half(found.roots, found.gradients, piece.read)
            if late is not None:
                self._late.append(late)
            elif found.roots:
                with accumulating():
                    torch.autograd.backward(found.roots, found.gradients)
        self._pieces.clear()
        self._stashed.clear()

    def late_bytes(self) -> int:
        """Of the gradients that :meth:`input_half` has kept for :meth:`weight_half`, each storage once."""
        storages = (tensor.untyped_storage() for half in self._late for tensor in half.kept())
        return sum({StorageWeakRef(storage): storage.nbytes() for storage in storages}.values())

    def weight_half(self, accumulating: Accumulating) -> None:
        """What :meth:`input_half` has left."""
        with accumulating():
            while self._late:
                self._late.pop(0).run()
