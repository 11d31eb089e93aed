"""What figures and kept costs were made by: a digest of sources."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


def _package() -> Path:
    """Found without loading it: some sides hold nothing of this project."""
    found = find_spec("deepspeed_pulse")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def digest(*paths: Path) -> str:
    """Of all Python files of the package, and of more files or folders."""
    return digest_of(_package(), *paths)


@functools.cache
def digest_of(*paths: Path) -> str:
    """Of Python files, and of those in folders."""
    found = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content = file.read_bytes()
            found.update(f"{file.relative_to(path.parent)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def kept(path: Path, make: Callable[[], str], *sources: Path) -> str:
    """Text that was kept beside ``path``, under the digest of the package and ``sources``; made where there is none."""
    from deepspeed_pulse.ir.fields import write_whole

    path = path.with_name(f"{path.stem}-{digest(*sources)}{path.suffix}")
    if not path.exists():
        write_whole(path, make())
    return path.read_text(encoding="utf-8")
