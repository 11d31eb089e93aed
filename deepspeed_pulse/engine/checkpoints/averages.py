"""Averaged weights in checkpoints: one ``EMA``, or of several backbones one each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_pulse.engine.checkpoints.files import EMA_FOLDER
from deepspeed_pulse.errors import ConfigError, FileError


def listed(ema: Any) -> Sequence[Any]:
    """None, one or several, as a list; a ConfigError for two of one backbone, and for averages of another kind."""
    found = [] if ema is None else list(ema) if isinstance(ema, (list, tuple)) else [ema]
    for one in found:
        # by what it has: the class stands in a part that this one does not import
        if not hasattr(one, "averages_of"):
            kind = f"{type(one).__module__}.{type(one).__qualname__}"
            raise ConfigError(
                f"ema: expected a deepspeed_pulse.models.EMA, found {kind}: a rank holds some of the layers only; make "
                "it with EMA(engine, decay=...)"
            )
    names = [one.backbone for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if len(found) > 1 and len(set(names)) < len(names):
        of = "one backbone" if twice is None else f"backbone {twice}"
        raise ConfigError(
            f"ema: expected one EMA for each backbone, found {names.count(twice)} of {of}; save the others beside the "
            "checkpoint with EMA.save(folder), and go on with EMA.load(folder)"
        )
    return found


def in_words(ema: Any) -> str:
    """For whom averages are given."""
    found = [one.backbone for one in listed(ema)]
    return f"ema= of {', '.join(found)}" if any(found) else "ema=" if found else "no ema="


def folder_of(checkpoint: Path, backbone: str | None) -> Path:
    """Where a checkpoint has the averages of a backbone; None: of the one there is."""
    return checkpoint / EMA_FOLDER / (backbone or "")


def save(ema: Any, checkpoint: Path) -> None:
    """Write averages into a checkpoint; collective."""
    for one in listed(ema):
        one.save(folder_of(checkpoint, one.backbone))


def read(ema: Any, checkpoint: Path, *, is_joint: bool, backbone: str | None) -> list[Any]:
    """The states of averages in a checkpoint, in order.

    Args:
        is_joint: the checkpoint is of several backbones.
        backbone: the one that is loaded; None: all there are.
    """
    found = []
    for one in listed(ema):
        if backbone is not None and one.backbone not in (None, backbone):
            raise ConfigError(f"ema: expected averages of backbone {backbone}, found those of {one.backbone}")
        name = (backbone or one.backbone) if is_joint else None
        folder = folder_of(checkpoint, name)
        if not folder.is_dir():
            raise FileError(
                f"{checkpoint}: expected averages in its folder {folder.relative_to(checkpoint)}, found none; load it "
                "without ema= to let averages start from its weights, or save with ema="
            )
        found.append(one.read(folder))
    return found
