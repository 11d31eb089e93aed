"""Wave pipelines for DeepSpeed: long skip connections stay on one rank.

Importing this package loads neither torch nor deepspeed; the first access to a public engine
name (``from deepspeed_pulse import PipelineModule``) does, and teaches ``deepspeed.initialize``
about it (see :mod:`deepspeed_pulse.engine.hook`).
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Backbone": "deepspeed_pulse.engine.backbones",
    "PipelineModule": "deepspeed_pulse.engine.module",
    "FrozenSpec": "deepspeed_pulse.engine.frozen",
    "LayerSpec": "deepspeed_pulse.engine.specs",
    "SelfConditioning": "deepspeed_pulse.engine.conditioning",
    "TiedLayerSpec": "deepspeed_pulse.engine.specs",
    "spec": "deepspeed_pulse.engine.specs",
    "PulseError": "deepspeed_pulse.errors",
}

_CHECK = "deepspeed_pulse.engine.waist.check"

__all__ = [
    "Backbone",
    "FrozenSpec",
    "LayerSpec",
    "PipelineModule",
    "PulseError",
    "SelfConditioning",
    "TiedLayerSpec",
    "__version__",
    "spec",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LAZY[name].startswith("deepspeed_pulse.engine"):
        importlib.import_module(_CHECK).check_names()
    return getattr(importlib.import_module(_LAZY[name]), name)
