"""Write a trained layer list back as the diffusers model it came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models.shards import write_sharded
from deepspeed_pulse.models.units import Origin, Unit, unit_of

WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIG = "config.json"


def save_pretrained(
    engine: Any,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    dtype: torch.dtype | None = None,
    variant: str | None = None,
) -> Path:
    """Write the trained weights as a normal diffusers folder, to be read by ``from_pretrained``.

    A collective call: every rank makes it, and the folder is complete when it returns. Files, index,
    keys, shapes and dtypes are those of the model's own ``save_pretrained(max_shard_size=, variant=)``.
    Global rank 0 writes and never holds more than one shard beyond its own layers.

    Args:
        engine: trains a list that ``to_layers``, ``from_pretrained`` or ``from_config`` made.
        folder: made when it does not exist; an earlier save of the same variant in it is replaced.
        max_shard_size: the largest file, in bytes or as text such as ``"5GB"``.
        dtype: of the floating-point weights in the files. Left out, the one the engine computes in:
            bfloat16 weights for an engine with ``"bf16"``. ``torch.float32`` then writes the
            optimizer's fp32 master weights. Parts that the model keeps in float32 stay so.
        variant: for example ``"fp16"``, part of the file names.

    Raises:
        ConfigError: the layer list was not made from a diffusers model, or layers of that model were
            left out of it; on every rank.
        FileError: rank 0 cannot write; on every rank. The folder then reads as before.
    """
    module = engine.module
    origin = _origin(module.layer_list)
    tensors = {
        key: tensor
        for _, layer in module.local_layers()
        if isinstance(layer, Unit)
        for key, tensor in layer.state_dict(keep_vars=True).items()
    }
    return write_sharded(
        engine,
        folder,
        tensors,
        keys=origin.state_keys,
        name=WEIGHTS,
        variant=variant,
        max_shard_size=max_shard_size,
        dtypes={}
        if dtype is None
        else {k: origin.dtype_of(k, dtype) for k, t in tensors.items() if t.is_floating_point()},
        texts={CONFIG: origin.config_json},
    )


def _origin(layer_list: list[Any]) -> Origin:
    """The one model that the layers were made from."""
    units = [unit for unit in map(unit_of, layer_list) if unit is not None]
    origins = {id(unit.origin): unit.origin for unit in units}
    if len(origins) != 1:
        raise ConfigError(
            f"save_pretrained() writes layers made from one diffusers model by deepspeed_pulse.models; "
            f"the layer list has layers of {len(origins)} models; use engine.save_checkpoint() for other lists"
        )
    return next(iter(origins.values()))
