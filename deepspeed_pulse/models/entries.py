"""Which arguments of a model's forward its layers read, and what it makes of Python numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed_pulse.engine.rules import EntryRules, NumberType
from deepspeed_pulse.models.units import unit_of

NOT_ENTRIES = {
    "cross_attention_kwargs": "layers pass none on; set a LoRA scale on the model (set_adapters) before to_layers()",
    "down_block_additional_residuals": "hand over the ControlNet itself: to_layers(unet, controlnet=controlnet)",
    "mid_block_additional_residual": "hand over the ControlNet itself: to_layers(unet, controlnet=controlnet)",
    "down_intrablock_additional_residuals": "adapters that add to the inside of blocks are not supported",
    "conditioning_scale": "pass it to to_layers(unet, controlnet=controlnet, conditioning_scale=...)",
}
"""Arguments of models' forward that no layer can read, and what to do instead."""

IGNORED: Mapping[str, Mapping[str, str]] = {
    "AudioLDM2UNet2DConditionModel": {"class_labels": "class_embedding"},
    "CogVideoXTransformer3DModel": {"ofs": "ofs_embedding"},
    "ControlNetModel": {"class_labels": "class_embedding", "added_cond_kwargs": ""},
    "HunyuanVideoTransformer3DModel": {"guidance": "time_text_embed.guidance_embedder"},
    "PixArtTransformer2DModel": {"added_cond_kwargs": ""},
    "UNet2DConditionModel": {"class_labels": "class_embedding", "added_cond_kwargs": ""},
    "UNet3DConditionModel": {"class_labels": "", "attention_mask": ""},
    "UNetMotionModel": {"added_cond_kwargs": ""},
    "UniDiffuserModel": {"data_type": "data_type_token_embedding"},
}
"""Arguments that a model takes and does not look at, by class: without a part of it, or ever (""). Conditions that a
model does look at are popped where its config asks for them."""

_LONG = NumberType(whole=torch.int64, fraction=torch.int64)
_INT = NumberType(whole=torch.int32, fraction=torch.int32)
_TIME = {"timestep": NumberType(whole=torch.int64, fraction=torch.float64)}

NUMBERS: Mapping[str, Mapping[str, NumberType]] = {
    **dict.fromkeys(("AudioLDM2UNet2DConditionModel", "ControlNetModel", "UNet2DConditionModel"), _TIME),
    **dict.fromkeys(("UNet3DConditionModel", "UNetMotionModel", "UNetSpatioTemporalConditionModel"), _TIME),
    "Kandinsky3UNet": {"timestep": NumberType(whole=torch.int32, fraction=torch.float32)},
    "UNet2DModel": {"timestep": _LONG},
    "UViTModel": {"timestep": NumberType(whole=torch.int64, fraction=torch.float32)},
    "UniDiffuserModel": {"timestep_img": _LONG, "timestep_text": _LONG, "data_type": _INT},
}
"""Arguments that models also take as Python numbers, by class, and the tensors that they make of them."""


def set_entry_rules(model: nn.Module, kind: type[nn.Module], layers: Iterable[Any], take: Callable[..., Any]) -> None:
    """Tell the units of a model's ``layers``, made by ``take``, which entries of a batch they go with.

    ``kind`` is the class that the family was written for.
    """
    layers = list(layers)
    popped = {name for layer in layers for name in layer.pop}
    required, optional = _arguments(kind)
    own = popped & {*required, *optional} | {name for name in popped if "." in name}
    numbers = NUMBERS.get(kind.__name__, {})
    options = inspect.signature(take).parameters
    rules = EntryRules(
        model=kind.__name__,
        numbers=numbers,
        tensors=frozenset(own - numbers.keys()),
        unread={
            name: _advice(model, name, options)
            for name in optional
            if name not in popped and not _is_ignored(model, kind, name)
        },
    )
    for unit in map(unit_of, layers):
        if unit is not None and unit.origin.model_class is type(model):
            unit.entry_rules = rules


def takes_timestep_cond(model: Any) -> bool:
    """Whether a U-Net adds a projection of ``timestep_cond`` to its time embedding; else it fails with one."""
    return getattr(model.config, "time_cond_proj_dim", None) is not None


def _arguments(kind: type[nn.Module]) -> tuple[list[str], list[str]]:
    """Names of the arguments of a model's forward behind the first: those it needs, and those that may be absent."""
    _, _, *parameters = inspect.signature(kind.forward).parameters.values()
    found = [one for one in parameters if one.name != "return_dict"]
    required = [one.name for one in found if one.default is one.empty]
    return required, [one.name for one in found if one.name not in required]


def _is_ignored(model: nn.Module, kind: type[nn.Module], name: str) -> bool:
    part, at = IGNORED.get(kind.__name__, {}).get(name), model
    for step in part.split(".") if part else ():
        at = getattr(at, step, None)  # type: ignore[assignment]
    return part == "" or at is None


def _advice(model: nn.Module, name: str, options: Mapping[str, Any]) -> str:
    if name == "timestep_cond" and not takes_timestep_cond(model):
        return "the model takes none: its config.time_cond_proj_dim is None"
    if name in options and name not in NOT_ENTRIES:
        return f"make the list with to_layers(model, {name}=True)"
    return NOT_ENTRIES.get(name, "layers cannot pass it on")
