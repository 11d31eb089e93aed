"""What may go into a checkpoint: tags that are names, and state that can be read again without running code."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from deepspeed_pulse.engine.checkpoints.claim import LOCK_FILE
from deepspeed_pulse.engine.checkpoints.reading import load_safely
from deepspeed_pulse.engine.collectives import told_by_all
from deepspeed_pulse.errors import ConfigError, FileError
from deepspeed_pulse.ir.run import RUN_FILE

LATEST = "latest"
WRITING, REPLACED, REMOVED = ".writing", ".replaced", ".removed"
"""What a tag's folder is called while it is written, while another takes its place, and while it is removed."""
EMA_FOLDER = "ema"
"""Of averaged weights, inside a checkpoint."""

RESERVED = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dimensions",
    }
)
"""Upstream's own keys beside which client state is saved; a test holds them against a file."""


def check_tag(tag: str) -> None:
    """A tag is the name of one folder inside the folder of checkpoints.

    Raises:
        ConfigError: it is another path, or a name that means something else there.
    """
    taken = tag in (LATEST, "latest_universal", LOCK_FILE, RUN_FILE) or tag.endswith((WRITING, REPLACED, REMOVED))
    if not tag.strip() or tag in (".", "..") or taken or any(c in tag for c in "/\\\0\n\r"):
        raise ConfigError(
            f"tag: expected the name of one folder, found {tag!r}: no path, not empty, and not {LATEST!r} or another "
            'name that has its own meaning there; for example "step100"'
        )


def check_asked_alike(mine: tuple[str, ...], what: str) -> None:
    """Every rank of the world must ask for the same checkpoint. Collective.

    Raises:
        ConfigError: they ask for different ones.
    """
    found = told_by_all(mine)
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        raise ConfigError(
            f"{what}: expected the same folder and tag on every rank, found {', '.join(found[0])} on rank 0 and "
            f"{', '.join(found[other])} on rank {other}"
        )


def check_client_state(state: Any) -> None:
    """Client state must be readable again, and must not stand in the way of upstream's.

    Raises:
        ConfigError: says which key, and why.
    """
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
    if kind in (torch.Tensor, torch.nn.Parameter):
        return None
    if kind in (dict, OrderedDict):
        return kind((_without_tensors(k), _without_tensors(v)) for k, v in value.items())
    return kind(map(_without_tensors, value)) if kind in (list, tuple) else value
