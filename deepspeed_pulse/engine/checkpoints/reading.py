"""A checkpoint's torch files: read without running code, fit for the model, with nothing that could not be read."""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from deepspeed_pulse.engine.specs import keys_not_loaded, loads_its_own_way
from deepspeed_pulse.errors import ConfigError, FileError, first_of

SAFE_GLOBALS = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""Classes of upstream's that its optimizer files hold; nothing else but tensors and plain data is unpickled."""

_WEIGHTS = ("module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments")
_TRAINING = ("optimizer", "lr_scheduler", "data_sampler", "random_ltd")
_PROGRESS = ("skipped_steps", "global_steps", "global_samples")
_JOB = ("dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dimensions")
RECORD = "pulse_checkpoint"
"""Beside them, the record of the checkpoint without names of parameters: a universal checkpoint has no file of it."""
RESERVED = frozenset((*_WEIGHTS, *_TRAINING, *_PROGRESS, *_JOB, RECORD))
"""Upstream's own keys, and ours, beside which client state is saved; a test holds them against a file."""


def load_safely(path: Path, map_location: Any = "cpu", *, file: Any = None) -> Any:
    """A torch file with tensors, plain data and :data:`SAFE_GLOBALS`; ``file``: its content, where it is in memory.

    Raises a :class:`FileError` where it cannot be read, or holds objects of other classes.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            return torch.load(path if file is None else file, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path}: expected a file of the checkpoint, found none; it was not saved whole") from None
    except Exception as problem:  # torch raises many kinds for a damaged or foreign file
        raise FileError(f"{path}: cannot be read safely: {_in_short(str(problem))}") from problem


def _in_short(problem: str) -> str:
    lines = problem.split("\n")
    line = next((line.strip() for line in lines if "GLOBAL" in line), lines[0]).partition(". Please use ")[0]
    if "GLOBAL" not in problem:
        return line
    return (
        f"{line}; only tensors and plain data are read: numbers (numpy's as x.item()), texts, lists, dicts; if you "
        "trust the class, call torch.serialization.add_safe_globals([...]) with it before saving and loading"
    )


def check_client_state(state: Any) -> None:
    """Raise a :class:`ConfigError`, with the key, for what could not be read again or hides upstream's own state."""
    if not isinstance(state, dict):
        raise ConfigError(f"client_state: expected a dict, found {type(state).__name__}")
    taken = sorted(RESERVED.intersection(state))
    if taken:
        raise ConfigError(
            f"client_state: {', '.join(map(repr, taken))}: DeepSpeed saves its own state under these keys; use others"
        )
    for key, value in state.items():
        try:
            check_loads_again({key: value}, Path("client_state"))
        except FileError as problem:
            raise ConfigError(f"client_state[{key!r}]: {str(problem).removeprefix('client_state: ')}") from problem


def check_loads_again(content: Any, path: Path) -> None:
    """Raise a :class:`FileError` for what could be saved but not loaded, or not even saved. Tensors are left out."""
    buffer = io.BytesIO()
    try:
        torch.save(_without_tensors(content), buffer)
    except Exception as problem:  # pickle raises many kinds
        raise FileError(f"{path}: cannot be saved: {type(problem).__name__}: {problem}") from problem
    buffer.seek(0)
    load_safely(path, file=buffer)


def _without_tensors(value: Any) -> Any:
    kind = type(value)
    if kind in (torch.Tensor, nn.Parameter):
        return None
    if kind in (dict, OrderedDict):
        return kind((_without_tensors(k), _without_tensors(v)) for k, v in value.items())
    return kind(map(_without_tensors, value)) if kind in (list, tuple) else value


def check_whole(folder: Path) -> None:
    """Raise a :class:`FileError` when a torch file of a checkpoint is cut off, before any rank starts to load."""
    for path in sorted(folder.glob("*.pt")):
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if is_zip and not zipfile.is_zipfile(path):
            raise FileError(
                f"{path}: expected a whole file, found a damaged one (its end is missing); resume from an older "
                "checkpoint by its tag"
            )


def check_layer(layer: nn.Module, state: Any, path: Path, *, strict: bool) -> None:
    """Raise a :class:`FileError` when a layer cannot take what its file holds, unless it loads in a way of its own.

    What it saves and does not load (:func:`keys_not_loaded`) must be what it has, and is taken out of ``state``.
    """
    if not isinstance(layer, nn.Module) or any(map(loads_its_own_way, layer.modules())):
        return
    if not isinstance(state, Mapping):
        raise FileError(f"{path}: expected the state of a layer, found {type(state).__name__}")
    mine = layer.state_dict()
    for key in keys_not_loaded(layer):
        found = state.pop(key, None) if isinstance(state, MutableMapping) else state.get(key)
        if found is not None and not _are_same(found, mine.pop(key)):
            raise FileError(
                f"{path}: does not fit its layer {type(layer).__name__}: {key} was saved with its quantized weight, is "
                "another one here, and is not loaded from a checkpoint; quantize the same base model in the same way, "
                "or load the adapters that save_lora() wrote into any"
            )
    missing, extra = [k for k in mine if k not in state], [k for k in state if k not in mine]
    if strict and (missing or extra):
        raise FileError(
            f"{path}: does not fit its layer {type(layer).__name__}: missing {_few(missing)}; unknown {_few(extra)}; "
            "build the same model, or load with load_module_strict=False"
        )
    for key, tensor in mine.items():
        found = state.get(key, tensor)
        if isinstance(tensor, torch.Tensor) and tensor.dim() and getattr(found, "shape", None) != tensor.shape:
            raise FileError(
                f"{path}: does not fit its layer {type(layer).__name__}: {key}: expected shape {list(tensor.shape)}, "
                f"found {list(getattr(found, 'shape', ()))}; build the same model"
            )


def _are_same(found: Any, mine: Any) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(mine, torch.Tensor):
        return found.shape == mine.shape and torch.equal(found.cpu(), mine.detach().cpu())
    return type(found) is type(mine) and bool(found == mine)


def _few(names: list[str]) -> str:
    return first_of(names, 3) or "nothing"
