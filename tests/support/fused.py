"""DeepSpeed's class of fused Adam doing AdamW in torch: its kernel takes minutes to compile, its class decides much."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam


class TorchFusedAdam(FusedAdam):
    """``FusedAdam`` to whoever asks; the arithmetic is torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        defaults = torch.optim.AdamW([torch.zeros(1)], lr=lr).defaults
        torch.optim.Optimizer.__init__(self, parameters, defaults)

    _init_group = torch.optim.AdamW._init_group

    def step(self, closure: Any = None) -> Any:
        return torch.optim.AdamW.step(self, closure)  # type: ignore[arg-type]


def fused_adamw(parameters: Any, lr: float) -> TorchFusedAdam:
    return TorchFusedAdam(list(parameters), lr)
