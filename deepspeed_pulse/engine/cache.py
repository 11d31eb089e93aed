"""What is kept between runs in the folder ``plan_cache``: measured profiles and solved plans, by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar


class _Written(Protocol):
    def to_json(self) -> str: ...


T = TypeVar("T", bound=_Written)


def kept(folder: str | None, kind: str, content: Any, load: Callable[[Path], T], make: Callable[[], T]) -> T:
    """The file that ``content`` (JSON-able) was kept under, or what ``make`` gives, kept for the next run.

    Written beside and renamed, so that a file is whole or absent. Without a folder nothing is kept.
    """
    if folder is None:
        return make()
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(folder) / f"{kind}-{key}.json"
    if path.exists():
        return load(path)
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(made.to_json(), encoding="utf-8")
    beside.replace(path)
    return made
