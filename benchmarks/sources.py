"""What figures and kept costs were made by: a digest of sources. And files that are whole or not there."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


def _package() -> Path:
    """Found without loading it: some sides hold nothing of this project."""
    found = find_spec("deepspeed_pulse")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


@functools.cache
def digest(*paths: Path) -> str:
    """Of all Python files of the package, and of more files or folders."""
    found = hashlib.sha256()
    for path in (_package(), *paths):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content = file.read_bytes()
            found.update(f"{file.relative_to(path.parent)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def kept(path: Path, make: Callable[[], str], *sources: Path) -> str:
    """Text that was kept beside ``path``, under the digest of the package and ``sources``; made where there is none."""
    path = path.with_name(f"{path.stem}-{digest(*sources)}{path.suffix}")
    if not path.exists():
        write_whole(path, make())
    return path.read_text(encoding="utf-8")


def write_whole(path: Path, text: str) -> None:
    """All at once: a run that is killed leaves the old file, or none."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
