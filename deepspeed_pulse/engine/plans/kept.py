"""Measured profiles kept by content in the ``plan_cache`` folder: the same job finds the same costs, and cuts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepspeed_pulse.engine.plans.costs import PlanRequest, parameters_of
from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.profile import Profile

_LIBRARIES = ("torch", "deepspeed", "diffusers", "transformers", "peft")


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
        write_whole(files[profile.microbatch_size], profile.to_json())


def write_whole(path: Path, text: str) -> None:
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


def read_cluster(path: Path, nodes: int, ranks_per_node: int) -> Cluster | None:
    """Kept links of machines of that shape; None where there are none, or no usable ones, which is said."""
    if not path.exists():
        return None
    try:
        cluster = Cluster.load(path)
    except FileError as problem:
        reason = str(problem)
    else:
        if (cluster.nodes, cluster.ranks_per_node) == (nodes, ranks_per_node):
            return cluster
        reason = f"expected {nodes} nodes of {ranks_per_node}, found {cluster.nodes} of {cluster.ranks_per_node}"
    _say_unusable(path, "links", reason)
    return None


def _say_unusable(path: Path, what: str, reason: str) -> None:
    print(f"pulse: the kept {what} in {path} are not this job's, measured anew: {reason}", flush=True)


def named_by(content: object) -> str:
    """A file's name for what its content depends on."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def library_versions() -> list[str]:
    """Of the libraries that layers and messages run in."""
    return [f"{name} {_version(name)}" for name in _LIBRARIES]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _files(request: PlanRequest, sizes: Sequence[int]) -> Iterator[tuple[int, Path]]:
    content = _content(request)
    for size in sizes:
        yield size, Path(str(request.pulse.plan_cache)) / f"profile-{named_by({**content, 'size': size})}.json"


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
