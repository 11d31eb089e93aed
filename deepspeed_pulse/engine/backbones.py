"""Several backbones as users declare them, and what of each is not layers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.engine.specs import graph_of
from deepspeed_pulse.errors import ConfigError, GraphError, did_you_mean
from deepspeed_pulse.ir.backbones import BackboneLayers, value_name
from deepspeed_pulse.ir.graph import Graph, Layer

DEFAULT_INPUT = "hidden"
"""Name of a first layer's input in a dict; where there is none of that name, it is the first entry."""

LABELS = "<labels>"
"""Name under which labels are known beside the entries of a batch."""

INPUT = "<input>"
"""The same of what a first layer reads, where there are several backbones."""


@dataclass(frozen=True)
class Backbone:
    """One of several models that train together in one pipeline; nothing passes between two of them.

    Args:
        layers: as ``PipelineModule`` takes them. Names of values are the backbone's own.
        loss_fn: ``loss_fn(output, labels)``; None: the last layer returns the loss.
        input: name of the first layer's input in the backbone's part of a batch.
    """

    layers: Any
    loss_fn: Any = None
    input: str = DEFAULT_INPUT


@dataclass(frozen=True, kw_only=True)
class Head:
    """What of a backbone is not layers. ``name`` is None where there is one."""

    name: str | None
    loss_fn: Any
    input: str
    layers: range

    def value(self, name: str) -> str:
        """The name of one of its values, or of its labels, in the list of all layers."""
        return value_name(self.name, name)

    @property
    def labels(self) -> str:
        return self.value(LABELS)


def heads_of(backbones: Mapping[str, Backbone], lists: Sequence[Sequence[Any]]) -> tuple[Head, ...]:
    """One for each backbone, whose layers are in ``lists``."""
    bounds = itertools.pairwise(itertools.accumulate(map(len, lists), initial=0))
    return tuple(
        Head(name=name, loss_fn=given.loss_fn, input=given.input, layers=range(*bound))
        for (name, given), bound in zip(backbones.items(), bounds, strict=True)
    )


def own_ties(name: str, layers: Sequence[Any]) -> list[Any]:
    """A backbone's layers, with keys of tied layers that no other backbone has."""
    return [_with_key(layer, name) if isinstance(layer, upstream.TiedLayerSpec) else layer for layer in layers]


def _with_key(layer: upstream.TiedLayerSpec, name: str) -> upstream.TiedLayerSpec:
    found = copy.copy(layer)
    found.key = f"{name}/{layer.key}"  # torch takes no dots in names of modules
    return found


def check_independent(graph: Graph, heads: Sequence[Head], held: Sequence[Sequence[tuple[int, str]]]) -> None:
    """Raise a GraphError for a weight that two backbones share; ``held``: layers and names of each that is shared."""
    for holders in held:
        owners = sorted({graph.backbone_of(layer) for layer, _ in holders})
        if len(owners) > 1:
            first, second = (next(h for h in holders if graph.backbone_of(h[0]) == owner) for owner in owners[:2])
            places = [f"{name!r} of layer {graph.layers[layer].name}" for layer, name in (first, second)]
            raise GraphError(
                f"backbones {heads[owners[0]].name} and {heads[owners[1]].name} share a weight: {places[0]} is "
                f"{places[1]}; each backbone trains as if it were alone, so give each a copy (copy.deepcopy)"
            )


def joint_graph(layers: Sequence[Any], heads: Sequence[Head]) -> Graph:
    """The declarations of all backbones' layers; a GraphError where one's do not fit together.

    With several, names of layers and values have the backbone's before them.
    """
    if heads[0].name is None:
        return graph_of(layers)
    found: list[Layer] = []
    for head in heads:
        own = graph_of(layers[head.layers.start : head.layers.stop], first=head.layers.start)
        found += [_renamed(layer, head) for layer in own.layers]
    return Graph(layers=tuple(found), starts=tuple(head.layers.start for head in heads))


def _renamed(layer: Layer, head: Head) -> Layer:
    return replace(
        layer,
        name=head.value(layer.name),
        stash=tuple(map(head.value, layer.stash)),
        pop=tuple(map(head.value, layer.pop)),
    )


def own_graph(graph: Graph, head: Head) -> Graph:
    """Of a joint graph, what one backbone's data is for: its layers and frozen parts, by its own names."""
    if head.name is None:
        return graph
    start = f"{head.name}."
    mine = [layer for layer in graph.layers if layer.name.removeprefix(FROZEN).startswith(start)]
    bare = [
        replace(
            layer,
            name=layer.name.replace(start, "", 1),
            stash=tuple(name.removeprefix(start) for name in layer.stash),
            pop=tuple(name.removeprefix(start) for name in layer.pop),
        )
        for layer in mine
    ]
    return Graph(layers=tuple(bare), derived=True)


FROZEN = "(frozen) "
"""Before the name of a frozen part, where it stands for a layer."""


def backbone_layers(heads: Sequence[Head]) -> tuple[BackboneLayers, ...]:
    """As profiles have them; nothing where there is one backbone."""
    return tuple(
        BackboneLayers(name=head.name, layers=(head.layers.start, head.layers.stop))
        for head in heads
        if head.name is not None
    )


def index_of(heads: Sequence[Head], name: str) -> int:
    """Of the backbone called ``name``; a ConfigError where there is none."""
    names = [head.name for head in heads]
    if name not in names or name is None:
        known = ", ".join(str(known) for known in names if known is not None) or "one, which has no name"
        raise ConfigError(
            f"expected the name of a backbone ({known}), found {name!r}{did_you_mean(str(name), list(map(str, names)))}"
        )
    return names.index(name)


def layers_of(heads: Sequence[Head], name: str | None, what: str) -> range:
    """Layers of the backbone called ``name``; None: of the one there is. ``what`` asks and is named in the error."""
    if name is None and len(heads) > 1:
        names = ", ".join(str(head.name) for head in heads)
        raise ConfigError(f"{what}: this engine trains several backbones; pass backbone=, one of {names}")
    if name is None:
        return heads[0].layers
    try:
        return heads[index_of(heads, name)].layers
    except ConfigError as problem:
        raise ConfigError(f"{what}: backbone: {problem}") from None


def check_backbones(backbones: Any, layers: Any, loss_fn: Any, input: Any = DEFAULT_INPUT) -> None:
    """Raise a ConfigError where the arguments of a module are not those of one backbone, or of several."""
    if backbones is None:
        if layers is None:
            raise ConfigError("PipelineModule: expected layers= (one backbone) or backbones= (several), found neither")
        return
    if layers is not None:
        raise ConfigError("PipelineModule: expected layers= (one backbone) or backbones= (several), found both")
    if loss_fn is not None:
        raise ConfigError(
            "PipelineModule: loss_fn= beside backbones=: each Backbone has its own: Backbone(..., loss_fn=)"
        )
    if input != DEFAULT_INPUT:
        raise ConfigError("PipelineModule: input= beside backbones=: each Backbone has its own: Backbone(..., input=)")
    if not isinstance(backbones, Mapping) or len(backbones) < 2:
        found = f"{len(backbones)} of them" if isinstance(backbones, Mapping) else type(backbones).__name__
        raise ConfigError(
            f"backbones: expected a dict of at least two Backbones by name, found {found}; pass one model as layers="
        )
    for name, given in backbones.items():
        if not isinstance(name, str) or not name or "." in name or "/" in name or name != name.strip():
            raise ConfigError(f"backbones: expected names without dots, slashes and spaces around them, found {name!r}")
        if not isinstance(given, Backbone):
            raise ConfigError(f"backbones: expected a Backbone for {name!r}, found {type(given).__name__}")
        if not isinstance(given.input, str) or not given.input:
            raise ConfigError(
                f"backbone {name}: input: expected the name of its first layer's input, found {given.input!r}"
            )
        if given.loss_fn is not None and not callable(given.loss_fn):
            raise ConfigError(
                f"backbone {name}: loss_fn: expected a function of the output and the labels, found {given.loss_fn!r}"
            )
