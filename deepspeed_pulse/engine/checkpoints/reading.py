"""Reading a checkpoint's torch files: no code runs, and what is there fits the model, before anything is changed."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from deepspeed_pulse.errors import FileError

SAFE_GLOBALS = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""Classes of upstream's that its optimizer files hold; nothing else but tensors and plain data is unpickled."""


def load_safely(path: Path, map_location: Any = "cpu", *, file: Any = None) -> Any:
    """A torch file with tensors, plain data and :data:`SAFE_GLOBALS`.

    Args:
        file: its content, where it is in memory.

    Raises:
        FileError: the file cannot be read, or holds objects of other classes.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            return torch.load(path if file is None else file, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path}: expected a file of the checkpoint, found none; it was not saved whole") from None
    except Exception as problem:  # torch raises many kinds for a damaged or foreign file
        raise FileError(f"{path}: cannot be read safely: {_first_line(problem)}{_hint(problem)}") from problem


def _first_line(problem: Exception) -> str:
    lines = str(problem).split("\n")
    line = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
    return line.partition(". Please use ")[0]


def _hint(problem: Exception) -> str:
    if "GLOBAL" not in str(problem):
        return ""
    return (
        "; only tensors and plain data are read: numbers (numpy's as x.item()), texts, lists, dicts; if you trust the "
        "class, call torch.serialization.add_safe_globals([...]) with it before saving and loading"
    )


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
    """Raise a :class:`FileError` when a layer cannot take what its file holds.

    Layers that load in a way of their own are not looked at.
    """
    if not isinstance(layer, nn.Module) or any(map(_loads_its_own_way, layer.modules())):
        return
    if not isinstance(state, Mapping):
        raise FileError(f"{path}: expected the state of a layer, found {type(state).__name__}")
    mine = layer.state_dict()
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


def _loads_its_own_way(module: nn.Module) -> bool:
    plain = nn.Module
    return (
        type(module).load_state_dict is not plain.load_state_dict
        or type(module)._load_from_state_dict is not plain._load_from_state_dict
        or bool(module._load_state_dict_pre_hooks)
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"
