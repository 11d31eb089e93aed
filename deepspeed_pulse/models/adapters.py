"""Where peft put its modules in a model, and which entries of the state dict are the model's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside peft's ``PeftModel``, adapters included; any other model is returned as it is."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def peft_configs(model: nn.Module) -> Mapping[str, Any]:
    """Adapter name to the config it was made from; empty for a model without adapters."""
    return dict(getattr(model, "peft_config", None) or {})


def base_keys(model: nn.Module) -> dict[str, str]:
    """Key in the state dict to the key it has without adapters; the adapters' own entries are left out.

    peft wraps a module that it changes: ``to_q.weight`` becomes ``to_q.base_layer.weight``.
    """
    if not peft_configs(model):
        return {key: key for key in model.state_dict()}
    return {key: base for key in model.state_dict() if (base := _base_key(model, key)) is not None}


def _base_key(model: nn.Module, key: str) -> str | None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kept: list[str] = []
    module: Any = model
    for part in key.split("."):
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            if part != ("base_layer" if isinstance(module, BaseTunerLayer) else "original_module"):
                return None
        else:
            kept.append(part)
        module = getattr(module, part, None)
    return ".".join(kept)
