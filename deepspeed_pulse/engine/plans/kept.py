"""Measured profiles and links kept in the ``plan_cache`` folder: the same job finds the same costs, so the same cuts.

A file's name is a hash of all that its content depends on. What is in it is compared with the job too: a file that was
cut short, edited, or copied from elsewhere is not used, which is said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from deepspeed_pulse.engine.plans.content import job_content
from deepspeed_pulse.engine.plans.costs import PlanRequest, misfits
from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.ir.fill import FrozenPart
from deepspeed_pulse.ir.profile import Profile

T = TypeVar("T")


def profiles(request: PlanRequest, sizes: Sequence[int]) -> dict[int, Profile]:
    """By microbatch size, the usable kept profiles that there are for a job."""
    if request.pulse.plan_cache is None:
        return {}
    found = {
        size: _usable(path, "profile", Profile.load, partial(_problems, request, size))
        for size, path in _files(request, sizes)
    }
    return {size: profile for size, profile in found.items() if profile is not None}


def _problems(request: PlanRequest, size: int, found: Profile) -> Iterator[str]:
    yield from misfits(request, found)
    if found.microbatch_size != size:
        yield f"expected microbatches of {size}, found {found.microbatch_size}"


def _usable(path: Path, what: str, load: Callable[[Path], T], problems: Callable[[T], Iterator[str]]) -> T | None:
    """What a kept file holds, if there is one; None, which is said, where it cannot be read or is not this job's."""
    if not path.exists():
        return None
    try:
        found = load(path)
    except FileError as problem:
        reason = str(problem).removeprefix(f"{path}: ")
    else:
        reason = next(problems(found), "")
        if not reason:
            return found
    print(f"pulse: the kept {what} {path} is not this job's and is measured anew: {reason}", flush=True)
    return None


def keep_profiles(request: PlanRequest, measured: Sequence[Profile]) -> None:
    """Write profiles for later runs, where the job has a ``plan_cache``; a FileError where that cannot be written."""
    if request.pulse.plan_cache is not None:
        files = dict(_files(request, [profile.microbatch_size for profile in measured]))
        for profile in measured:
            write_whole(files[profile.microbatch_size], profile.to_json())


def with_kept_times(plan_cache: str, content: object, measured: Sequence[FrozenPart]) -> tuple[FrozenPart, ...]:
    """Frozen parts with the times of an earlier run that measured the same; without one these, which are kept.

    A plan's file is named by its costs: with new times in every run no run would find it.
    """
    path = Path(plan_cache) / f"frozen-{named_by(content)}.json"
    rows = _times(path, measured)
    if rows is None:
        write_whole(path, json.dumps({part.name: [layer.forward_ms for layer in part.layers] for part in measured}))
        return tuple(measured)
    return tuple(
        replace(
            part,
            layers=tuple(replace(layer, forward_ms=ms) for layer, ms in zip(part.layers, row, strict=True)),
        )
        for part, row in zip(measured, rows, strict=True)
    )


def _times(path: Path, parts: Sequence[FrozenPart]) -> list[list[float]] | None:
    """ms a layer, of every part; None, which is said, where a file is none of these."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [[float(ms) for ms in found[part.name]] for part in parts]
    except (OSError, ValueError, TypeError, KeyError):
        rows = []
    if [len(row) for row in rows] == [len(part.layers) for part in parts]:
        return rows
    print(f"pulse: the kept times of frozen parts {path} are not this job's and are measured anew", flush=True)
    return None


def check_folder(plan_cache: str) -> None:
    """A FileError for a folder that cannot be written to, before hours go into what would be kept there."""
    probe = Path(plan_cache) / ".probe"
    write_whole(probe, "")
    probe.unlink(missing_ok=True)


def read_cluster(path: Path, nodes: int, ranks_per_node: int) -> Cluster | None:
    """Kept links of machines of that shape; None where there are no usable ones."""

    def problems(found: Cluster) -> Iterator[str]:
        if (found.nodes, found.ranks_per_node) != (nodes, ranks_per_node):
            yield f"expected {nodes} nodes of {ranks_per_node}, found {found.nodes} of {found.ranks_per_node}"

    return _usable(path, "cluster", Cluster.load, problems)


def named_by(content: object) -> str:
    """A file's name for what its content depends on."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _files(request: PlanRequest, sizes: Sequence[int]) -> Iterator[tuple[int, Path]]:
    content = job_content(request)
    for size in sizes:
        yield size, Path(str(request.pulse.plan_cache)) / f"profile-{named_by([content, size])}.json"
