"""What ranks say of cases that share one launch: each prints ``CASE [name, class, text]`` of every case's error."""

from __future__ import annotations

import json
from pathlib import Path

from support.launch import launch

Found = list[dict[str, tuple[str, str]]]
"""Per rank: case to (class, text) of its error."""


def found_by(target: str, world: int, argument: object) -> Found:
    """Every rank ends by itself, with status 0, or the launch is an error."""
    lines = [output.splitlines() for _, output in launch(target, world, argument, timeout=200)]
    rows = [[json.loads(line.removeprefix("CASE")) for line in log if line.startswith("CASE")] for log in lines]
    return [{name: (kind, text) for name, kind, text in row} for row in rows]


def assert_told(found: Found, name: str, kind: str, *parts: str) -> None:
    """The case has its class and every part of its text, the same on every rank, in a few lines."""
    first, *others = [rank.get(name, ("", "did not run")) for rank in found]
    assert first[0] == kind, (name, first)
    assert not [part for part in parts if part not in first[1]], (name, first)
    assert all(other == first for other in others), (name, first, others)
    assert len(first[1]) < 2000, (name, first)


def files_below(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, to see whether it changed."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}
