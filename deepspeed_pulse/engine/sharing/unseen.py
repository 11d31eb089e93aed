"""Weights with several places that a layer list alone cannot show, and what shared modules cannot keep: refused.

A plain module in the list shares its parameters openly (:mod:`.shared`). A function may read weights that
nothing lists, and a ``LayerSpec`` may build a layer around a parameter of another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.engine.collectives import raise_everywhere
from deepspeed_pulse.engine.plans.costs import stand_in
from deepspeed_pulse.engine.sharing.closures import weights_reached
from deepspeed_pulse.engine.sharing.shared import SharedWeights
from deepspeed_pulse.engine.specs import unwrap
from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.effects import Effects
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.stage import module_of

AGREED_STEPS = 2
"""First steps after which ranks tell each other whether a shared buffer has changed; later each looks for itself."""


def check_functions(layers: Sequence[Any], graph: Graph, loss_fn: Any) -> None:
    """Raise a :class:`GraphError` for a function, or a loss, that reads trainable weights.

    It says which function and, where a layer holds it, which weight.
    """
    names: dict[torch.Tensor, str] = {
        p: f"{name} of layer {graph.layers[index].name}"
        for index, layer in enumerate(map(unwrap, layers))
        if isinstance(layer, torch.nn.Module)
        for name, p in layer.named_parameters()
    }
    for declared, layer in zip(graph.layers, map(unwrap, layers), strict=True):
        function = getattr(layer, "forward_fn", None) if isinstance(layer, upstream.LayerSpec) else layer
        found = [] if isinstance(function, torch.nn.Module) else weights_reached(function)
        if found:
            what = names.get(found[0], f"a parameter of shape {list(found[0].shape)}")
            raise GraphError(
                f"layer {declared.name} is a function that reads trainable weights, the first is {what}: no optimizer, "
                "checkpoint or other rank would know of it; make the layer a module that holds the weight (modules may "
                "share parameters), or freeze the weight with requires_grad_(False)",
                more="shared-weights",
            )
    read = loss_fn.parameters() if isinstance(loss_fn, torch.nn.Module) else weights_reached(loss_fn)
    trained = next((p for p in read if p.requires_grad), None)
    if trained is None:
        return
    if trained in names:
        raise GraphError(
            f"loss_fn reads {names[trained]}, which lies on the rank of its layer only; let that layer stash what the "
            "loss needs, and make the last layer a module that shares the parameter"
        )
    raise GraphError(
        f"loss_fn has trainable weights, the first is a parameter of shape {list(trained.shape)}: no checkpoint would "
        "hold them; make the last layer a module that holds what is trained, or freeze the loss with "
        "requires_grad_(False)"
    )


def check_shared(shared: SharedWeights, graph: Graph) -> None:
    """Raise a :class:`GraphError`, with the layers, for shared statistics and parameters that overlap in memory."""
    for buffer in shared.buffers:
        if buffer.holders[0][1].rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked"):
            raise GraphError(
                f"layers {_listed(graph, buffer.layers)} share a module that keeps running statistics "
                f"({buffer.holders[0][1]}): its uses update them in turn, microbatch by microbatch, which no pipeline "
                "can; give each layer its own, or use track_running_stats=False or a norm without statistics"
            )
    for first, second in shared.overlaps():
        raise GraphError(
            f"parameters {first} and {second} are two, but in the same memory; assign the parameter itself "
            "(b.weight = a.weight), so that they are one"
        )


def check_buffers(shared: SharedWeights) -> None:
    """Raise a :class:`GraphError`, with the buffer, where a layer has written to one that others share since watched.

    After the first steps collective in the world, for a model that shares buffers: all ranks raise what one finds.
    """
    if not shared.buffers:
        return
    changed, problem = shared.changed_buffer(), None
    if changed is not None:
        problem = GraphError(
            f"buffer {changed} belongs to several layers and changed while the step ran: its uses would change it in "
            "turn, microbatch by microbatch, which no pipeline can; give each layer a buffer of its own, or pass the "
            "state on as a named value"
        )
    if shared.num_watches <= AGREED_STEPS:
        raise_everywhere(problem, "the step")
    if problem is not None:
        raise problem


def check_changed_weights(module: Any, effects: Sequence[Effects]) -> None:
    """Raise a :class:`GraphError`, with the layers, for a shared weight that not all who read it would find changed.

    In one process a layer that changes a weight in forward changes it for all that share it. Copies on other ranks stay
    as they are, unless each layer normalises them as well; so does a weight that a stage before has read already.
    ``effects``: of all layers.
    """
    stage_of = module.stage_owner if module.plan is None else module.plan.stage_of
    for holders in _places(module, effects):
        layers = list(dict.fromkeys(index for index, _ in holders))
        changed = {index: name for index, name in holders if name in effects[index].all_weights}
        if not changed or len(set(map(stage_of, layers))) == 1:
            continue
        if len(set(map(module.stage_owner, layers))) > 1:
            fits = len(changed) == len(layers) and all(name in effects[i].weights for i, name in changed.items())
            where = "lie on several ranks: each has a copy, which would change alone"
        else:
            fits = layers[0] in changed
            where = "the first stage reads it unchanged: with more microbatches in flight it would do so more often"
        if not fits:
            changer, name = next(iter(changed.items()))
            raise GraphError(
                f"layers {_listed(module.graph, layers)} share a weight, which {module.graph.layers[changer].name} "
                f"changes in forward ({name}), and {where}; normalise it where it is read, without changing it, give "
                "each layer a weight of its own, or cut so that they lie in one stage (partition_method, "
                '"placement")',
                more="shared-weights",
            )


def _places(module: Any, effects: Sequence[Effects]) -> Iterator[Sequence[tuple[int, str]]]:
    """Of each weight that several layers share, their indices and its names there; of tied ones, those that change."""
    yield from (shared.holders for shared in module.shared.parameters)
    keys: dict[Any, list[int]] = {}
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, upstream.TiedLayerSpec):
            keys.setdefault(layer.key, []).append(index)
    for indices in keys.values():
        for name in sorted(frozenset[str]().union(*(effects[index].all_weights for index in indices))):
            yield [(index, name) for index in indices]


def _listed(graph: Graph, layers: Sequence[int]) -> str:
    return " and ".join(graph.layers[index].name for index in layers)


def check_builds(module: Any) -> None:
    """Raise a :class:`GraphError`, with the layers, where a built one has a trainable parameter of another one.

    Layers of other ranks are built on the meta device, which costs no memory: what a build takes from outside
    of itself (an argument, a global, a cache) is the same object every time.
    """
    owners: dict[torch.Tensor, tuple[int, str]] = {}
    for index, owner in _all_modules(module):
        for name, parameter in owner.named_parameters(remove_duplicate=False):
            other, _ = owners.setdefault(parameter, (index, name))
            if parameter.requires_grad and not _openly(module.layer_list, other, index):
                raise GraphError(
                    f"layers {_listed(module.graph, (other, index))} are built with one parameter ({name}): a layer "
                    "spec is built on the rank where it lies, so no other rank can know that; put the modules "
                    "themselves into the list (they may share parameters), or tie the layers with TiedLayerSpec",
                    more="shared-weights",
                )


def _openly(layers: Sequence[Any], first: int, second: int) -> bool:
    """Both are in the list as modules, or as specs of one key."""
    one, other = unwrap(layers[first]), unwrap(layers[second])
    if first == second or (isinstance(one, torch.nn.Module) and isinstance(other, torch.nn.Module)):
        return True
    key = getattr(one, "key", None)
    return key is not None and key == getattr(other, "key", None)


def _all_modules(module: Any) -> Iterator[tuple[int, torch.nn.Module]]:
    """The module of every layer that has one, by index."""
    here = dict(module.local_layers())
    for index, layer in enumerate(module.layer_list):
        bare = unwrap(layer)
        found = here.get(index, bare if isinstance(bare, torch.nn.Module) else None)
        if found is None and isinstance(bare, upstream.LayerSpec) and not getattr(bare, "reads_files", False):
            found = module.tied_modules[bare.key] if getattr(bare, "key", None) in module.tied_modules else _meta(bare)
        owner = module_of(found)
        if owner is not None:
            yield index, owner


def _meta(layer: Any) -> Any:
    """None where a layer cannot be built there; the rank that holds it has built it."""
    try:
        return stand_in(layer)
    except Exception:
        return None
