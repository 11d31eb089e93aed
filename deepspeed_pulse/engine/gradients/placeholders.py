"""Placeholders: parameters that stand where a rank, or one of its parameter groups, has nothing to train.

Optimizers refuse an empty list, and upstream drops empty groups. Its optimizers for mixed precision and
ZeRO-1 sum norms over the pipeline once a group, so every rank must have as many.
"""

from __future__ import annotations

import torch

PLACEHOLDER = "pulse_placeholder"


def is_placeholder(name: str) -> bool:
    """True for the name of a placeholder, which is nobody's parameter."""
    return name.startswith(PLACEHOLDER)


def add_placeholder(module: torch.nn.Module) -> tuple[str, torch.nn.Parameter]:
    """Give a module one more, of the device and dtype of its parameters; returns its name too."""
    name = f"{PLACEHOLDER}{sum(is_placeholder(key) for key, _ in module.named_parameters()) or ''}"
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(1))
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
    module.register_parameter(name, parameter)
    return name, parameter
