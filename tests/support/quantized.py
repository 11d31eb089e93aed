"""Linear layers as bitsandbytes quantizes them, without it: packed weights, constants that are saved and not loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Linear4bit(nn.Module):
    """A frozen weight in whole numbers, with the factor of each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.absmax = linear.weight.detach().abs().amax(dim=1)
        rounded = (linear.weight.detach() / self.absmax[:, None] * 7).round() + 8
        self.weight = nn.Parameter(rounded.to(torch.uint8), requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.to(x.dtype) - 8) * (self.absmax[:, None] / 7).to(x.dtype)
        return nn.functional.linear(x, weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax


def quantize(model: Any) -> Any:
    """The model itself, its config too, with such layers in the places of those that have adapters."""
    for module in list(model.modules()):
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Linear):
            module.base_layer = Linear4bit(base)
    model.register_to_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    return model
