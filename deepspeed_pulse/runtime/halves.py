"""A backward in two halves: gradients of what was read first, those of weights when there is time (zero bubble,
arXiv 2401.10241).

A node of autograd's graph through which gradients flow to a leaf, and from which weights hang, is a *fork*. The input
half runs from the roots to the leaves and keeps what arrives at the forks; the weight half runs from the forks to their
weights. Autograd computes of each node only what the half asks for, so both together cost what a whole backward does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from deepspeed_pulse.runtime.roots import Root, takes_edges

Gradients = Sequence[torch.Tensor | None]


@dataclass
class Fork:
    """A node with weights below it, and the gradients that have arrived there."""

    node: Node
    weights: list[torch.Tensor]
    arrived: list[torch.Tensor | None] | None = None

    def keep(self, gradients: Gradients) -> Gradients | None:
        """Called with what arrives: kept the first time, put in its place the second.

        Hooks that tensors have were called before, and would change a gradient twice.
        """
        if self.arrived is None:
            self.arrived = list(gradients)
            return None
        return tuple(self.arrived)

    def run(self) -> None:
        """Add to the weights' gradients."""
        pairs = [(GradientEdge(self.node, i), g) for i, g in enumerate(self.arrived or ()) if g is not None]
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.weights, retain_graph=True)


@dataclass
class WeightHalf:
    """What is left of a backward when its input half has run."""

    forks: list[Fork] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)
    """Of a part that nothing was read for: all of its backward."""
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def run(self) -> None:
        """Add to the weights' gradients. The graph goes with this object."""
        for fork in self.forks:
            fork.run()
        if self.roots:
            torch.autograd.backward(self.roots, self.gradients, retain_graph=True)


def input_half(roots: Sequence[Root], gradients: Gradients, leaves: Iterable[torch.Tensor]) -> WeightHalf | None:
    """Add to the leaves' gradients, and to nothing else.

    Args:
        leaves: what was read and wants a gradient.

    Returns:
        What is to be run later; None where the graph cannot be divided and nothing was done: a weight hangs from two
        places, one of them behind the other.
    """
    wanted = list({id(leaf): leaf for leaf in leaves if leaf.requires_grad}.values())
    if not wanted or not roots:
        return WeightHalf(roots=list(roots), gradients=list(gradients))
    if not takes_edges():
        return None
    graph = _Graph(roots, wanted)
    forks = graph.forks()
    if forks is None:
        return None
    apart = [(root, g) for root, g in zip(roots, gradients, strict=True) if root.node not in graph.between]
    hooks = [fork.node.register_prehook(fork.keep) for fork in forks]
    del hooks  # they stay: the weight half needs them, and they go with the graph
    torch.autograd.backward(roots, gradients, inputs=wanted, retain_graph=True)
    return WeightHalf(forks, [root for root, _ in apart], [g for _, g in apart])


class _Graph:
    """Autograd's graph below some roots.

    Attributes:
        between: nodes from which a gradient reaches one of the leaves.
    """

    def __init__(self, roots: Sequence[Root], leaves: Sequence[torch.Tensor]) -> None:
        self.between: set[Node] = set()
        self._order = _leaves_first([root.node for root in roots])
        self._below: dict[Node, list[torch.Tensor]] = {}
        """Of nodes from which a gradient reaches weights and no leaf."""
        wanted = set(map(id, leaves))
        for node, following in self._order:
            leaf = getattr(node, "variable", None)
            if leaf is None:
                if any(other in self.between for other in following):
                    self.between.add(node)
                elif weights := self._weights(following):
                    self._below[node] = weights
            elif id(leaf) in wanted:
                self.between.add(node)
            else:
                self._below[node] = [leaf]

    def forks(self) -> list[Fork] | None:
        """Those nearest the leaves first; None where a weight hangs from two of them."""
        found = [
            Fork(node, weights)
            for node, following in self._order
            if node in self.between and (weights := self._weights(following))
        ]
        hung = [id(weight) for fork in found for weight in fork.weights]
        return found if len(hung) == len(set(hung)) else None

    def _weights(self, nodes: Iterable[Node]) -> list[torch.Tensor]:
        return list({id(weight): weight for node in nodes for weight in self._below.get(node, ())}.values())


def _leaves_first(roots: Sequence[Node]) -> list[tuple[Node, list[Node]]]:
    """Every node with those that a gradient goes to from it, behind all of these."""
    order: list[tuple[Node, list[Node]]] = []
    seen: set[Node] = set()
    open_: list[tuple[Node, list[Node] | None]] = [(root, None) for root in reversed(roots)]
    while open_:
        node, following = open_.pop()
        if following is not None:
            order.append((node, following))
        elif node not in seen:
            seen.add(node)
            following = [other for other, _ in node.next_functions if other is not None]
            open_.append((node, following))
            open_.extend((other, None) for other in following if other not in seen)
    return order


def accumulated(leaf: Any, gradient: torch.Tensor) -> None:
    """Add a gradient to a leaf's, as autograd does."""
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
