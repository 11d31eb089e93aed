"""What layers of other ranks keep on this rank's device: a script moves its whole model there before it is cut.

Plans and tables count what a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepspeed_pulse.engine.sharing.closures import tensors_reached
from deepspeed_pulse.engine.specs import unwrap

_HOST = ("cpu", "meta")


def move_to_host(module: Any) -> int:
    """Move to the CPU what layers of other ranks hold and nothing of this rank reads; the bytes that moved.

    Modules stay the script's own: their tensors lie elsewhere. ``module``: a ``PipelineModule`` whose layers are built.
    """
    held = {index for index, _ in module.local_layers()}
    others = [unwrap(layer) for index, layer in enumerate(module.layer_list) if index not in held]
    parts = [part for layer in others if isinstance(layer, torch.nn.Module) for part in layer.modules()]
    away = [part for part in parts if any(tensor.device.type not in _HOST for tensor in _own(part))]
    kept = set(map(id, _kept(module))) if away else set()
    moved = 0

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        if tensor.device.type in _HOST:
            return tensor
        moved += tensor.nbytes
        return tensor.cpu()

    for part in away:
        if not any(id(tensor) in kept for tensor in _own(part)):
            torch.nn.Module._apply(part, on_host, recurse=False)
    return moved


def _kept(module: Any) -> Iterator[torch.Tensor]:
    """What this rank's layers have, frozen parts, which have places of their own, and what functions read."""
    functions = [head.loss_fn for head in module.job.heads]
    if module.job.conditioning is not None:
        functions += [one.estimate for one in module.job.conditioning.by_backbone.values()]
    if module.frozen is not None:
        functions += [unwrap(layer) for _, layers in module.frozen.described.values() for layer in layers]
    functions += [function for _, function in module.local_layers()]
    modules = [module, *(one for one in functions if isinstance(one, torch.nn.Module))]
    for one in modules:
        yield from (*one.parameters(), *one.buffers())
    # a module may know others that are no part of it
    methods = [part.forward for one in modules[1:] for part in one.modules()]
    yield from tensors_reached(*methods, *(one for one in functions if not isinstance(one, torch.nn.Module)))


def _own(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
