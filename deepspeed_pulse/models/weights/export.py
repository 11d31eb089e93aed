"""Write a trained layer list back as the model it came from."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.models.units import Origin
from deepspeed_pulse.models.weights.folder import CONFIG, PLAIN_WEIGHTS, WEIGHTS
from deepspeed_pulse.models.weights.shards import Files, Part, write_sharded

if TYPE_CHECKING:
    from deepspeed_pulse.models.weights.ema import EMA

logger = logging.getLogger(__name__)


def save_pretrained(
    engine: Any,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    ema: EMA | None = None,
    model_class: type[nn.Module] | None = None,
    backbone: str | None = None,
) -> Path:
    """Write the trained weights as a normal diffusers folder, to be read by ``from_pretrained``.

    A collective call: every rank makes it, and the folder is complete when it returns. Files, index,
    keys, shapes and dtypes are those of the model's own ``save_pretrained(max_shard_size=, variant=)``. Of a model that
    is none of diffusers', they are those of its state dict, in ``model.safetensors`` or shards of it, without a config:
    ``huggingface_hub.load_torch_model(model, folder)`` reads them.
    Global rank 0 writes and never holds more than one shard beyond its own layers. A model with
    adapters is written without them, under the names it has without; :func:`.save_lora` writes those.

    Args:
        engine: trains a list that ``to_layers``, ``from_pretrained`` or ``from_config`` made.
        folder: made when it does not exist; an earlier save of the same variant in it is replaced.
        max_shard_size: the largest file, in bytes or as text such as ``"5GB"``.
        dtype: of the floating-point weights in the files. Left out, the one the engine computes in:
            bfloat16 weights for an engine with ``"bf16"``. ``torch.float32`` then writes the
            optimizer's fp32 master weights. Parts that the model keeps in float32 stay so.
        variant: for example ``"fp16"``, part of the file names.
        ema: also write the averaged weights, in float32 unless ``dtype`` says otherwise, to a folder of
            the same name with ``_ema`` (``unet_ema`` beside ``unet``), with the averaging's state in its
            config: ``EMAModel.from_pretrained`` of diffusers reads both.
        model_class: which model, when the list was made of two (a U-Net and its ControlNet).
        backbone: which backbone, where the engine trains several.

    Raises:
        ConfigError: the layer list was not made from a model, or layers of that model were left out of it; there are
            several backbones and none is named; on every rank.
        FileError: rank 0 cannot write; on every rank. The folder then reads as before.
    """
    part = Part.asked(engine, "save_pretrained()", model_class, backbone, dtype=dtype, ema=ema)
    origin = part.origin
    averages = {} if ema is None else ema.averages_of(backbone)

    def tensors(averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = part.own_tensors(engine, averaged)
        return {origin.base_keys[key]: tensor for key, tensor in own.items() if key in origin.base_keys}

    def write(to: str | os.PathLike[str], averaged: Mapping[str, Tensor], dtype: Any, more: dict[str, Any]) -> Path:
        mine = engine.module.ranks.together(lambda: tensors(averaged), "save_pretrained()")
        cast = {key: origin.dtype_of(key, dtype) for key, t in mine.items() if dtype and t.is_floating_point()}
        files = Files(
            name=WEIGHTS if origin.is_of_diffusers else PLAIN_WEIGHTS,
            variant=variant,
            max_shard_size=max_shard_size,
            texts={CONFIG: _config(origin, more)} if origin.is_of_diffusers else {},
        )
        return write_sharded(engine, to, mine, files, keys=tuple(origin.base_keys.values()), dtypes=cast)

    if origin.adapted and engine.global_rank == 0:
        logger.warning(
            "save_pretrained(): %s gets the model without its adapters (%s); save_lora() writes those",
            folder,
            ", ".join(origin.adapter_names),
        )
    if ema is not None:
        # diffusers keeps the averaging's state in the config of the averaged model.
        write(f"{Path(folder)}_ema", averages, dtype or torch.float32, ema.schedule())
    return write(folder, {}, dtype, {})


def _config(origin: Origin, more: dict[str, Any]) -> str:
    """The model's, to the byte, where nothing is added."""
    if not more:
        return origin.config_json
    return json.dumps({**json.loads(origin.config_json), **more}, indent=2, sort_keys=True) + "\n"
