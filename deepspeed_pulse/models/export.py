"""Write a trained layer list back as the diffusers model it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from deepspeed_pulse.errors import ConfigError
from deepspeed_pulse.models.units import Origin, Unit

WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIG = "config.json"


def save_pretrained(engine: Any, folder: str | os.PathLike[str]) -> Path:
    """Write the trained weights as a normal diffusers folder, to be read by ``from_pretrained``.

    A collective call: every rank makes it. Layers travel to global rank 0 one at a time, each from
    the rank of data-parallel index 0 that holds it, so only rank 0 ever holds the whole model (on
    the CPU). Only rank 0 writes; other ranks may return before the folder is complete. Each file
    is written beside its final name and then renamed. Keys, shapes and dtypes are those of the
    model's own ``save_pretrained``.

    Raises :class:`ConfigError`, on every rank, when the layer list was not made from a diffusers
    model, and on rank 0 when layers of that model were left out of the list.
    """
    module, folder = engine.module, Path(folder)
    origin = _origin(module.layer_list)
    held = {index: layer for index, layer in module.local_layers() if isinstance(layer, Unit)}
    if engine.grid.data_parallel_id != 0:
        held = {}
    state: dict[str, Tensor] = {}
    for index in range(len(module.layer_list)):
        mine = _on_cpu(held[index].state_dict()) if index in held else None
        for part in module.gather_to_first(mine) or ():
            state.update(part or {})
    if engine.global_rank == 0:
        _write(folder, origin, state)
    return folder


def _origin(layer_list: list[Any]) -> Origin:
    """The one model that the layers were made from."""
    bare = [getattr(layer, "layer", layer) for layer in layer_list]
    origins = {id(layer.origin): layer.origin for layer in bare if isinstance(layer, Unit)}
    if len(origins) != 1:
        raise ConfigError(
            f"save_pretrained() writes layers made from one diffusers model by deepspeed_pulse.models; "
            f"the layer list has layers of {len(origins)} models; use engine.save_checkpoint() for other lists"
        )
    return next(iter(origins.values()))


def _on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().to("cpu", copy=True).contiguous() for key, value in state.items()}


def _write(folder: Path, origin: Origin, state: dict[str, Tensor]) -> None:
    missing = [key for key in origin.state_keys if key not in state]
    if missing:
        raise ConfigError(
            f"save_pretrained(): no layer of the list holds {len(missing)} of the {len(origin.state_keys)} entries of "
            f"the {origin.model_class.__name__}, the first is {missing[0]}; train the whole list that to_layers() gives"
        )
    folder.mkdir(parents=True, exist_ok=True)
    ordered = {key: state[key] for key in origin.state_keys}
    _replace(folder / WEIGHTS, lambda path: save_file(ordered, path, metadata={"format": "pt"}))
    _replace(folder / CONFIG, lambda path: path.write_text(origin.config_json, encoding="utf-8"))
    # An index left by an earlier, sharded save would be read instead of the new weights.
    (folder / f"{WEIGHTS}.index.json").unlink(missing_ok=True)


def _replace(path: Path, write: Any) -> None:
    beside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
