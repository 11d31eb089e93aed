"""Adapters of peft (LoRA) on a model that became layers, written as diffusers or peft write them.

Adapters are put on the model first, with ``model.add_adapter(LoraConfig(...))`` or with peft's ``get_peft_model`` or
``inject_adapter_in_model``; ``to_layers`` then carries them along, because layers borrow the model's own modules. Seed
before, the same on every rank, for initial weights that do not depend on the plan. Ranks without an adapter take part
as usual. Dropout in adapters (``lora_dropout``) draws from the generator of the rank that runs the layer: as any
dropout under a pipeline, it is as random as in one process, but not the same numbers.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import ConfigError, did_you_mean
from deepspeed_pulse.models.units import Origin
from deepspeed_pulse.models.weights.shards import Files, Part, write_sharded

if TYPE_CHECKING:
    from deepspeed_pulse.models.weights.ema import EMA

DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
UNLIMITED = 2**60
"""Adapters are one file, as nobody reads shards of them. Bytes."""


def save_lora(
    engine: Any,
    folder: str | os.PathLike[str],
    *,
    adapter_name: str = "default",
    format: Literal["diffusers", "peft"] = "diffusers",
    prefix: str | None = None,
    dtype: torch.dtype | None = None,
    ema: EMA | None = None,
    model_class: type[nn.Module] | None = None,
    backbone: str | None = None,
) -> Path:
    """Write one adapter; a collective call, every rank makes it.

    Args:
        engine: trains a list made of a model with adapters.
        folder: made when it does not exist.
        adapter_name: which adapter, as named in ``add_adapter``.
        format: ``"diffusers"``: ``pytorch_lora_weights.safetensors``, with the adapter's config in its
            metadata, as ``StableDiffusionPipeline.save_lora_weights`` writes it; read by
            ``pipeline.load_lora_weights(folder)`` and by
            ``model.load_lora_adapter(folder, prefix=prefix, use_safetensors=True)``.
            ``"peft"``: ``adapter_model.safetensors`` and ``adapter_config.json``, read by
            ``PeftModel.from_pretrained(model, folder)``, for models and kinds of adapters that
            diffusers does not load.
        prefix: of the names in diffusers' format; left out, what its pipelines call such a model:
            ``"unet"`` or ``"transformer"``; ``""`` for none.
        dtype: of the weights in the file; left out, the one the engine computes in. ``torch.float32``
            then writes the optimizer's fp32 master weights.
        ema: also write the averaged adapter, in float32, to a folder of the same name with ``_ema``.
        model_class: which model, when the list was made of two (a U-Net and its ControlNet).
        backbone: which backbone, where the engine trains several.

    Raises:
        ConfigError: the model has no such adapter, or diffusers cannot load it; on every rank.
        FileError: rank 0 cannot write; on every rank.
    """
    part = Part.asked(engine, "save_lora()", model_class, backbone, dtype=dtype, ema=ema)
    origin = part.origin
    averages = {} if ema is None else ema.averages_of(backbone)
    config = _config(origin, adapter_name)
    if format == "diffusers":
        _check_diffusers(origin, config)
        prefix = _pipeline_name(origin) if prefix is None else prefix
        prefix = f"{prefix}." if prefix else ""
        name, texts = DIFFUSERS_WEIGHTS, {}
        metadata = {"format": "pt", "lora_adapter_metadata": _metadata(config, prefix)}
    elif format == "peft":
        prefix, name, metadata = "base_model.model.", PEFT_WEIGHTS, {"format": "pt"}
        texts = {PEFT_CONFIG: _config_json(config)}
    else:
        raise ConfigError(f'format: expected "diffusers" or "peft", found {format!r}')

    def write(to: str | os.PathLike[str], averaged: dict[str, Tensor], dtype: torch.dtype | None) -> Path:
        mine = engine.module.ranks.together(lambda: _adapter(engine, part, adapter_name, averaged), "save_lora()")
        tensors = {prefix + key: tensor for key, tensor in mine.items()}
        dtypes = {} if dtype is None else dict.fromkeys(tensors, dtype)
        files = Files(name=name, max_shard_size=UNLIMITED, metadata=metadata, texts=texts)
        return write_sharded(engine, to, tensors, files, dtypes=dtypes)

    if ema is not None:
        write(f"{Path(folder)}_ema", averages, dtype or torch.float32)
    return write(folder, {}, dtype)


def _adapter(engine: Any, part: Part, name: str, averaged: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's tensors on this rank, under the names that peft gives them in files."""
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = {}
    for unit, state in part.own_states(engine, averaged):
        found |= get_peft_model_state_dict(unit, state, name, save_embedding_layers=False)
    return found


def _config(origin: Origin, adapter_name: str) -> Any:
    if adapter_name in origin.peft_config:
        return origin.peft_config[adapter_name]
    kind = origin.model_class.__name__
    if not origin.peft_config:
        raise ConfigError(
            f"save_lora(): this {kind} has no adapters; put one on before to_layers(), with "
            "model.add_adapter(LoraConfig(...)), or write the whole model with save_pretrained()"
        )
    raise ConfigError(
        f"save_lora(): this {kind} has no adapter {adapter_name!r}{did_you_mean(adapter_name, origin.peft_config)}; "
        f"its adapters: {', '.join(origin.peft_config)}"
    )


def _check_diffusers(origin: Origin, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if not hasattr(origin.model_class, "load_lora_adapter"):
        raise ConfigError(
            f'save_lora(): diffusers loads no adapters into a {origin.model_class.__name__}; use format="peft", which '
            "PeftModel.from_pretrained(model, folder) reads"
        )
    if kind != "LORA":
        raise ConfigError(f'save_lora(): diffusers\' format holds LORA adapters, found {kind}; use format="peft"')


def _pipeline_name(origin: Origin) -> str:
    """What diffusers' pipelines call a model of this class."""
    kind = origin.model_class.__name__
    return "unet" if "UNet" in kind else "controlnet" if "ControlNet" in kind else "transformer"


def _metadata(config: Any, prefix: str) -> str:
    """The adapter's config as diffusers puts it into a file, so that rank and alpha are found again."""
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    return json.dumps({prefix + key: value for key, value in plain.items()}, indent=2, sort_keys=True)


def _config_json(config: Any) -> str:
    """The text of peft's config file, for loading; written by peft."""
    config = copy.copy(config)
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return Path(folder, PEFT_CONFIG).read_text(encoding="utf-8")
