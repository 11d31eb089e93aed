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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from deepspeed_pulse.errors import ConfigError, did_you_mean
from deepspeed_pulse.models.units import Adapted, Origin
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

    Parts of a model may have adapters of one name, each its own: ``unet.add_adapter(...)`` and
    ``text_encoder.add_adapter(...)`` in a module that holds both. diffusers' format has all of them in one file, each
    part under its name in that module, so call them as the pipeline does (``unet``, ``text_encoder``). peft's has a
    folder for each part, of its name.

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
        prefix: of the names in diffusers' format; left out, what its pipelines call such a model
            (``"unet"`` or ``"transformer"``), of several parts their names; ``""`` for none.
        dtype: of the weights in the file; left out, the one the engine computes in. ``torch.float32``
            then writes the optimizer's fp32 master weights.
        ema: also write the averaged adapter, in float32, to a folder of the same name with ``_ema``.
        model_class: which model, when the list was made of two (a U-Net and its ControlNet).
        backbone: which backbone, where the engine trains several.

    Raises:
        ConfigError: the model has no such adapter, or diffusers cannot load it; there is a ``prefix`` and several
            parts; on every rank.
        FileError: rank 0 cannot write; on every rank.
    """
    part = Part.asked(engine, "save_lora()", model_class, backbone, dtype=dtype, ema=ema)
    averages = {} if ema is None else ema.averages_of(backbone)
    adapted = _adapted(part.origin, adapter_name)
    if format == "diffusers":
        written = [_of_diffusers(adapted, adapter_name, prefix)]
    elif format == "peft":
        written = [_of_peft(one, adapter_name, alone=len(adapted) == 1) for one in adapted]
    else:
        raise ConfigError(f'format: expected "diffusers" or "peft", found {format!r}')

    def write(to: str | os.PathLike[str], averaged: dict[str, Tensor], dtype: torch.dtype | None) -> Path:
        def tensors(one: _Written) -> dict[str, Tensor]:
            pairs = ((start, _adapter(engine, part, own, adapter_name, averaged)) for start, own in one.parts.items())
            return {start + key: tensor for start, found in pairs for key, tensor in found.items()}

        for one in written:
            mine = engine.module.ranks.together(partial(tensors, one), "save_lora()")
            dtypes = {} if dtype is None else dict.fromkeys(mine, dtype)
            write_sharded(engine, Path(to) / one.folder, mine, one.files, dtypes=dtypes)
        return Path(to)

    if ema is not None:
        write(f"{Path(folder)}_ema", averages, dtype or torch.float32)
    return write(folder, {}, dtype)


@dataclass(frozen=True, kw_only=True)
class _Written:
    """One file of adapters: of these parts, by what stands before their names in it."""

    parts: Mapping[str, Adapted]
    files: Files
    folder: str = ""


def _of_diffusers(adapted: Sequence[Adapted], adapter_name: str, prefix: str | None) -> _Written:
    """All parts in one file, as pipelines read it."""
    if prefix is not None and len(adapted) > 1:
        raise ConfigError(
            "save_lora(): prefix=: expected none, as several parts have adapters and go by their own names "
            f"({', '.join(one.name for one in adapted)}), found {prefix!r}; leave it out"
        )
    parts: dict[str, Adapted] = {}
    told: dict[str, Any] = {}
    for one in adapted:
        config = one.configs[adapter_name]
        _check_diffusers(one, config)
        name = prefix
        if name is None:
            name = one.name if len(adapted) > 1 else _pipeline_name(one)
        start = f"{name}." if name else ""
        parts[start] = one
        told |= _metadata(config, start)
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(told, indent=2, sort_keys=True)}
    return _Written(
        parts=parts, files=Files(name=DIFFUSERS_WEIGHTS, max_shard_size=UNLIMITED, metadata=metadata, texts={})
    )


def _of_peft(adapted: Adapted, adapter_name: str, *, alone: bool) -> _Written:
    """A folder for each part."""
    texts = {PEFT_CONFIG: _config_json(adapted.configs[adapter_name])}
    files = Files(name=PEFT_WEIGHTS, max_shard_size=UNLIMITED, metadata={"format": "pt"}, texts=texts)
    return _Written(parts={"base_model.model.": adapted}, files=files, folder="" if alone else adapted.name)


def _adapter(engine: Any, part: Part, adapted: Adapted, name: str, averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's tensors on this rank, under the names that peft gives them in files."""
    from peft import get_peft_model_state_dict

    start = f"{adapted.path}." if adapted.path else ""
    found: dict[str, Tensor] = {}
    for unit, state in part.own_states(engine, averaged):
        own = {key.removeprefix(start): tensor for key, tensor in state.items() if key.startswith(start)}
        if own:
            inside = _Inside(unit.get_submodule(adapted.path), adapted)
            found |= get_peft_model_state_dict(inside, own, name, save_embedding_layers=False)
    return found


class _Inside(nn.Module):
    """What a layer has of a model with adapters, with their configs where peft looks for them."""

    def __init__(self, held: nn.Module, adapted: Adapted) -> None:
        super().__init__()
        self._modules.update(held._modules)
        self.peft_config = adapted.configs


def _adapted(origin: Origin, adapter_name: str) -> list[Adapted]:
    """What has that adapter."""
    if found := [part for part in origin.adapted if adapter_name in part.configs]:
        return found
    kind = origin.model_class.__name__
    if not origin.adapted:
        raise ConfigError(
            f"save_lora(): this {kind} has no adapters; put one on before to_layers(), with "
            "model.add_adapter(LoraConfig(...)), or write the whole model with save_pretrained()"
        )
    raise ConfigError(
        f"save_lora(): this {kind} has no adapter {adapter_name!r}{did_you_mean(adapter_name, origin.adapter_names)}; "
        f"its adapters: {', '.join(origin.adapter_names)}"
    )


def _check_diffusers(adapted: Adapted, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    # its pipelines load those of their text encoders, which are transformers', themselves
    loads = hasattr(adapted.model_class, "load_lora_adapter")
    if not loads and not (adapted.name and hasattr(adapted.model_class, "load_adapter")):
        raise ConfigError(
            f'save_lora(): diffusers loads no adapters into a {adapted.model_class.__name__}; use format="peft", which '
            "PeftModel.from_pretrained(model, folder) reads"
        )
    if kind != "LORA":
        raise ConfigError(f'save_lora(): diffusers\' format holds LORA adapters, found {kind}; use format="peft"')


def _pipeline_name(adapted: Adapted) -> str:
    """What diffusers' pipelines call such a model; of a text encoder there are several, so its own name."""
    kind = adapted.model_class.__name__
    if not hasattr(adapted.model_class, "load_lora_adapter"):
        return adapted.name
    return "unet" if "UNet" in kind else "controlnet" if "ControlNet" in kind else "transformer"


def _metadata(config: Any, prefix: str) -> dict[str, Any]:
    """The adapter's config as diffusers puts it into a file, so that rank and alpha are found again."""
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    return {prefix + key: value for key, value in plain.items()}


def _config_json(config: Any) -> str:
    """The text of peft's config file, for loading; written by peft."""
    config = copy.copy(config)
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return Path(folder, PEFT_CONFIG).read_text(encoding="utf-8")
