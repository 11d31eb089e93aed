"""Measured profiles kept by content in the ``plan_cache`` folder: the same job finds the same costs, and cuts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed_pulse.engine.plans.costs import PlanRequest, parameters_of
from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.profile import Profile


def profiles(request: PlanRequest, sizes: Sequence[int]) -> dict[int, Profile]:
    """By microbatch size, the kept profiles there are for a job."""
    if request.pulse.plan_cache is None:
        return {}
    return {size: Profile.load(path) for size, path in _files(request, sizes) if path.exists()}


def keep_profiles(request: PlanRequest, measured: Sequence[Profile]) -> None:
    """Write profiles for later runs, where the job has a ``plan_cache``.

    Raises:
        FileError: the folder cannot be written to.
    """
    if request.pulse.plan_cache is None:
        return
    files = dict(_files(request, [profile.microbatch_size for profile in measured]))
    for profile in measured:
        _write(files[profile.microbatch_size], profile.to_json())


def _write(path: Path, text: str) -> None:
    """All at once, so that a reader at the same time finds a whole file or none."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as problem:
        raise FileError(
            f"plan_cache: cannot keep {path.name} in {path.parent}: {problem.strerror or problem}; name another folder"
        ) from None


def _files(request: PlanRequest, sizes: Sequence[int]) -> Iterator[tuple[int, Path]]:
    content = _content(request)
    for size in sizes:
        key = hashlib.sha256(json.dumps({**content, "size": size}, sort_keys=True).encode()).hexdigest()[:32]
        yield size, Path(str(request.pulse.plan_cache)) / f"profile-{key}.json"


def _content(request: PlanRequest) -> dict[str, Any]:
    """What a measured profile depends on."""
    assert request.example is not None
    inputs, entries = request.example
    return {
        "layers": [(layer.name, layer.stash, layer.pop) for layer in request.graph.layers],
        "parameters": [[(list(p.shape), p.requires_grad) for p in parameters_of(layer)] for layer in request.layers],
        "batch": {name: _described(value) for name, value in {"": inputs, **entries}.items()},
        "device": request.device.type,
        "threads": torch.get_num_threads(),
    }


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, (tuple, list)):
        return [_described(item) for item in value]
    return repr(value)
