"""Layers that share a module: built alike wherever they lie, saved and loaded with its state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.engine.specs import TiedCall


def build_tied(module: Any, layers: range) -> None:
    """Build tied modules as their first layer would be, so that initial weights do not depend on the plan.

    Args:
        module: the ``PipelineModule``, whose ``tied_modules`` and ``tied_weight_attrs`` are filled.
        layers: those to be built next, by index.
    """
    specs = module._layer_specs
    for layer in (specs[index] for index in layers):
        if not isinstance(layer, upstream.TiedLayerSpec) or layer.key in module.tied_modules:
            continue
        first = next(
            i for i, other in enumerate(specs) if isinstance(other, upstream.TiedLayerSpec) and other.key == layer.key
        )
        if module.seed_layers:
            (module.seed_fn or upstream.ds_utils.set_random_seed)(module.base_seed + first)
        module.tied_modules[layer.key] = specs[first].build()
    tie_all_parameters(module)


def tie_all_parameters(module: Any) -> None:
    """Layers of one key share a module, so every parameter of it is tied, not only ``tied_weight_attr``."""
    for key, tied in module.tied_modules.items():
        module.tied_weight_attrs[key] = [name for name, _ in tied.named_parameters()]


def adopt_tied_calls(functions: list[Any], tied_modules: Mapping[str, Any]) -> None:
    """Replace, in place, what upstream makes of a tied ``forward_fn``: saves and loads its module's state too."""
    for position, function in enumerate(functions):
        if isinstance(function, partial) and function.func is not None and len(function.args) == 1:
            module = function.args[0]
            if any(module is tied for tied in tied_modules.values()):
                functions[position] = TiedCall(module, function.func)
