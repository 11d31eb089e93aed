"""diffusers models as layer lists, and back: ``from deepspeed_pulse.models import to_layers``."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "EMA": "deepspeed_pulse.models.weights.ema",
    "freeze": "deepspeed_pulse.models.weights.freezing",
    "from_config": "deepspeed_pulse.models.weights.lazy",
    "from_pretrained": "deepspeed_pulse.models.weights.lazy",
    "gather_model": "deepspeed_pulse.models.weights.gather",
    "save_lora": "deepspeed_pulse.models.weights.lora",
    "save_pretrained": "deepspeed_pulse.models.weights.export",
    "to_layers": "deepspeed_pulse.models.families",
    "unfreeze": "deepspeed_pulse.models.weights.freezing",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
