"""Checkpoint files that are complete or absent, and that run no code when they are read.

A save writes into a folder beside its final name, syncs every file, and then renames: whoever reads
finds the whole checkpoint or the one before. ``latest`` is written last, the same way.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from deepspeed_pulse.errors import FileError

SAFE_GLOBALS = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""Classes of upstream's that its optimizer files hold; nothing else but tensors and plain data is unpickled."""

LATEST = "latest"


class SafeCheckpointEngine(TorchCheckpointEngine):
    """Upstream's files, synced to disk when written and read without running code."""

    def save(self, state_dict: Any, path: str) -> None:
        super().save(state_dict, path)
        sync(Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_safely(Path(path), map_location)


def load_safely(path: Path, map_location: Any = "cpu") -> Any:
    """A torch file with tensors, plain data and :data:`SAFE_GLOBALS`.

    Raises:
        FileError: the file cannot be read, or holds objects of other classes.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path}: expected a file of the checkpoint, found none; it was not saved whole") from None
    except Exception as problem:  # torch raises many kinds for a damaged or foreign file
        raise FileError(f"{path}: cannot be read safely: {_first_line(problem)}{_hint(problem)}") from problem


def _first_line(problem: Exception) -> str:
    return next((line.strip() for line in str(problem).splitlines() if "GLOBAL" in line), str(problem).split("\n")[0])


def _hint(problem: Exception) -> str:
    if "GLOBAL" not in str(problem):
        return ""
    return (
        "; only tensors and plain data are read (put those into client_state); if you trust the file, call "
        "torch.serialization.add_safe_globals([...]) with that class before load_checkpoint"
    )


def check_whole(folder: Path) -> None:
    """Raise a :class:`FileError` when a torch file of a checkpoint is cut off, before any rank starts to load."""
    for path in sorted(folder.glob("*.pt")):
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if is_zip and not zipfile.is_zipfile(path):
            raise FileError(
                f"{path}: expected a whole file, found a damaged one (its end is missing); resume from an older "
                "checkpoint by its tag"
            )


class CheckpointFolder:
    """``save_dir/tag`` while it is written and when it is there.

    All ranks write into :attr:`writing` (a tag of its own); then one of them calls :meth:`commit`.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str) -> None:
        self.save_dir, self.tag = Path(save_dir), tag

    @property
    def writing(self) -> str:
        """Tag under which the files are written."""
        return f"{self.tag}.writing"

    @property
    def _replaced(self) -> Path:
        return self.save_dir / f"{self.tag}.replaced"

    def clear(self) -> None:
        """Drop what an unfinished save has left."""
        shutil.rmtree(self.save_dir / self.writing, ignore_errors=True)

    def commit(self, *, save_latest: bool) -> None:
        """Give the written folder its name, then point ``latest`` to it."""
        sync(self.save_dir / self.writing)
        final = self.save_dir / self.tag
        if final.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            rename(final, self._replaced)
        rename(self.save_dir / self.writing, final)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if save_latest:
            write_text(self.save_dir / LATEST, self.tag)

    def recover(self) -> None:
        """A save that died between its two renames left the old checkpoint under another name: take it back."""
        if self._replaced.is_dir() and not (self.save_dir / self.tag).exists():
            rename(self._replaced, self.save_dir / self.tag)


def find_tag(load_dir: str | os.PathLike[str], tag: Any) -> str | None:
    """The tag given, or the one that ``latest`` names; None when there is neither."""
    if tag is not None:
        return str(tag)
    latest = Path(load_dir) / LATEST
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None


def write_text(path: Path, text: str) -> None:
    """Write a small file: beside, synced, renamed."""
    beside = path.with_name(f"{path.name}.writing")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    rename(beside, path)


def rename(source: Path, target: Path) -> None:
    """Rename, and make the new name durable."""
    os.replace(source, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
