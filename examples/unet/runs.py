"""What the run in an output folder is of, so that another is not taken for its continuation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

KEPT = "run.json"


def check_run(out: Path, *, classes: Sequence[str], size: int) -> None:
    """End where ``out`` holds a run on other classes or of another size. All ranks ask before one writes there."""
    path = out / KEPT
    if not path.is_file():
        return
    kept = json.loads(path.read_text(encoding="utf-8"))
    for what, found in {"classes": list(classes), "size": size}.items():
        if kept[what] != found:
            raise SystemExit(
                f"{out} holds a run with {what} {_words(kept[what])}, found {_words(found)}: "
                "give another --out (OUT= of make), or remove that folder"
            )


def keep_run(out: Path, *, classes: Sequence[str], size: int) -> None:
    (out / KEPT).write_text(json.dumps({"classes": list(classes), "size": size}) + "\n", encoding="utf-8")


def _words(found: list[str] | int) -> str:
    return str(found) if isinstance(found, int) else ", ".join(found)
