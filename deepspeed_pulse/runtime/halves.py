"""A backward in two halves: gradients of what was read first, those of weights when there is time (zero bubble,
arXiv 2401.10241).

A node of autograd's graph through which gradients flow to a leaf, and from which weights hang, is a *fork*. The input
half runs from the roots to the leaves and keeps what arrives at the forks; the weight half runs from the forks to their
weights. Autograd computes of each node only what the half asks for, so both together cost what a whole backward does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from deepspeed_pulse.runtime.roots import Root, takes_edges

Gradients = Sequence[torch.Tensor | None]

_NEEDS_INPUT = "NativeGroupNormBackward0"
"""torch's kernel for tensors of channels last in the host's memory dies (SIGSEGV, torch 2.13) without its input's."""

_COMPILED = "CompiledFunctionBackward"
"""What ``torch.compile`` makes of many operations: it gives all gradients at once, and mostly once only."""


class Arrived:
    """The gradients that have arrived at a node.

    The node has it as a hook, so it must not have the node: the graph would stay until the garbage collector comes.
    """

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor | None] | None = None

    def __call__(self, gradients: Gradients) -> Gradients | None:
        """Called with what arrives: kept the first time, put in its place the second.

        Hooks that tensors have were called before, and would change a gradient twice.
        """
        if self.gradients is None:
            self.gradients = list(gradients)
            return None
        return tuple(self.gradients)


@dataclass
class Fork:
    """A node with weights below it."""

    node: Node
    arrived: Arrived = field(default_factory=Arrived)

    @property
    def needs_input(self) -> bool:
        """Gradients of weights can be had only together with the input's."""
        return self.node.name() == _NEEDS_INPUT and any(g.is_cpu for _, g in self.given())

    @property
    def input(self) -> Root:
        """Where the gradient of the node's first input goes."""
        node, number = self.node.next_functions[0]
        assert node is not None
        return GradientEdge(node, number)

    def given(self) -> list[tuple[Root, torch.Tensor]]:
        """Where a backward of the weights begins."""
        return [(GradientEdge(self.node, i), g) for i, g in enumerate(self.arrived.gradients or ()) if g is not None]


@dataclass
class Bunch:
    """Forks that have weights in common, mostly one, and all weights below them."""

    forks: list[Fork]
    weights: dict[int, torch.Tensor]

    def run(self) -> None:
        """Add to the weights' gradients."""
        pairs = [pair for fork in self.forks for pair in fork.given()]
        if not pairs:
            return
        edges, gradients = zip(*pairs, strict=True)
        weights = list(self.weights.values())
        unwanted: list[Any] = [fork.input for fork in self.forks if fork.needs_input]
        if not unwanted:
            torch.autograd.backward(edges, gradients, inputs=weights, retain_graph=True)
            return
        with _without_hooks(weights):  # which run below, once
            found = torch.autograd.grad(edges, [*weights, *unwanted], gradients, retain_graph=True)[: len(weights)]
        torch.autograd.backward(weights, found)  # through the hooks that optimizers have there


@contextmanager
def _without_hooks(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """While hooks on these tensors do not run."""
    hooks = [(found, dict(found)) for weight in weights for found in (weight._backward_hooks,) if found]
    for found, _ in hooks:
        found.clear()
    try:
        yield
    finally:
        for found, before in hooks:
            found.update(before)


@dataclass
class WeightHalf:
    """What is left of a backward when its input half has run."""

    bunches: list[Bunch] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)
    """Of a part that nothing was read for: all of its backward."""
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def kept(self) -> list[torch.Tensor]:
        """Gradients that it begins from."""
        arrived = [g for bunch in self.bunches for fork in bunch.forks for _, g in fork.given()]
        return [*arrived, *(g for g in self.gradients if g is not None)]

    def run(self) -> None:
        """Add to the weights' gradients. The graph goes with this object."""
        for bunch in self.bunches:
            bunch.run()
        if self.roots:
            # bunches may have nodes in common with it; without any it goes through the graph alone
            torch.autograd.backward(self.roots, self.gradients, retain_graph=bool(self.bunches))


def input_half(roots: Sequence[Root], gradients: Gradients, leaves: Iterable[torch.Tensor]) -> WeightHalf | None:
    """Add to the leaves' gradients, and to nothing else.

    Args:
        leaves: what was read and wants a gradient.

    Returns:
        What is to be run later; None where the graph cannot be divided and nothing was done: a weight hangs from two
        forks, one of them behind the other, or a part of it was compiled.
    """
    wanted = list({id(leaf): leaf for leaf in leaves if leaf.requires_grad}.values())
    if not wanted or not roots:
        return WeightHalf(roots=list(roots), gradients=list(gradients))
    if not takes_edges():
        return None
    graph = _Graph(roots, wanted)
    bunches = None if graph.is_compiled else graph.bunches()
    if bunches is None:
        return None
    apart = [(root, g) for root, g in zip(roots, gradients, strict=True) if root.node not in graph.between]
    for bunch in bunches:
        for fork in bunch.forks:
            fork.node.register_prehook(fork.arrived)  # for the weight half too; it goes with the graph
    torch.autograd.backward(roots, gradients, inputs=wanted, retain_graph=True)
    return WeightHalf(bunches, [root for root, _ in apart], [g for _, g in apart])


class _Graph:
    """Autograd's graph below some roots.

    Attributes:
        between: nodes from which a gradient reaches one of the leaves.
        is_compiled: some of it is one node that stands for many.
    """

    def __init__(self, roots: Sequence[Root], leaves: Sequence[torch.Tensor]) -> None:
        self.between: set[Node] = set()
        self._order = _leaves_first([root.node for root in roots])
        self.is_compiled = any(node.name() == _COMPILED for node, _ in self._order)
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

    def bunches(self) -> list[Bunch] | None:
        """Those nearest the leaves first; None where a fork of one stands behind another."""
        found: list[Bunch] = []
        for node, following in self._order:
            weights = {id(weight): weight for weight in self._weights(following)} if node in self.between else {}
            if weights:
                shared = [bunch for bunch in found if bunch.weights.keys() & weights.keys()]
                forks = [fork for bunch in shared for fork in bunch.forks]
                if forks and self._reaches(node, {fork.node for fork in forks}):
                    return None
                for bunch in shared:
                    found.remove(bunch)
                    weights = bunch.weights | weights
                found.append(Bunch([*forks, Fork(node)], weights))
        return found

    def _reaches(self, node: Node, others: set[Node]) -> bool:
        """Whether gradients go from a node to one of those, which come before it."""
        return not others.isdisjoint(other for other, _ in _leaves_first([node]))

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
