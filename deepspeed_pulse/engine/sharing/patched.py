"""Adapters that no model has: modules whose forward, or a hook, is another module's, which nothing lists.

So kohya's and LyCORIS's adapters are put on: ``linear.forward`` becomes a method of a module that holds the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch

from deepspeed_pulse.engine.sharing.closures import weights_reached
from deepspeed_pulse.errors import GraphError

ADVICE = (
    "register the adapter in the module that it changes, before the layer list is made "
    "(linear.add_module('lora', adapter)), or use one of peft's (add_adapter)"
)


def check_patched(modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
    """Raise a :class:`GraphError` where a forward or hook put on a module reads a trainable weight that none has.

    ``modules``: all that are to be layers, with their names; or the model that is to become layers, with an empty one.
    """
    known = {id(parameter) for _, module in modules for parameter in module.parameters()}
    for name, root in modules:
        for path, module in root.named_modules():
            for what, function in _put_on(module):
                lost = next((weight for weight in weights_reached(function) if id(weight) not in known), None)
                if lost is not None:
                    where = f"{name}: {path}" if name and path else name or path or "the model itself"
                    raise GraphError(
                        f"{where} has {what}{_owner(function)}, which reads a trainable weight (of shape "
                        f"{list(lost.shape)}) that no layer has: it would not be moved, summed over replicas or saved; "
                        f"{ADVICE}",
                        more="patched",
                    )


def _put_on(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What is called with the module, or in its place, and is not its class's."""
    if "forward" in vars(module):
        yield "a forward set on the instance", vars(module)["forward"]
    for kind in ("forward_pre", "forward"):
        yield from (("a forward hook", hook) for hook in getattr(module, f"_{kind}_hooks").values())


def _owner(function: Any) -> str:
    owner = function.__self__ if isinstance(function, MethodType) else None
    return f" (a method of a {type(owner).__name__})" if isinstance(owner, torch.nn.Module) else ""
