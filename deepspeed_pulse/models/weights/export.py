"""Write a trained layer list back as the diffusers model it came from."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.models.weights.folder import CONFIG
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
    keys, shapes and dtypes are those of the model's own ``save_pretrained(max_shard_size=, variant=)``.
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
        ConfigError: the layer list was not made from a diffusers model, or layers of that model were
            left out of it; there are several backbones and none is named; on every rank.
        FileError: rank 0 cannot write; on every rank. The folder then reads as before.
    """
    part = Part.asked(engine, "save_pretrained()", model_class, backbone)
    origin = part.origin
    averages = {} if ema is None else ema.averages_of(backbone)

    def tensors(averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = part.own_tensors(engine, averaged)
        return {origin.base_keys[key]: tensor for key, tensor in own.items() if key in origin.base_keys}

    def write(to: str | os.PathLike[str], averaged: Mapping[str, Tensor], dtype: Any, config: str) -> Path:
        mine = engine.module.ranks.together(lambda: tensors(averaged), "save_pretrained()")
        cast = {key: origin.dtype_of(key, dtype) for key, t in mine.items() if dtype and t.is_floating_point()}
        files = Files(variant=variant, max_shard_size=max_shard_size, texts={CONFIG: config})
        return write_sharded(engine, to, mine, files, keys=tuple(origin.base_keys.values()), dtypes=cast)

    if origin.peft_config and engine.global_rank == 0:
        logger.warning(
            "save_pretrained(): %s gets the model without its adapters (%s); save_lora() writes those",
            folder,
            ", ".join(origin.peft_config),
        )
    if ema is not None:
        # diffusers keeps the averaging's state in the config of the averaged model.
        config = {**json.loads(origin.config_json), **ema.schedule()}
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        write(f"{Path(folder)}_ema", averages, dtype or torch.float32, text)
    return write(folder, {}, dtype, origin.config_json)
