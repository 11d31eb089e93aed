"""Checkpoint files that are complete or absent, that are what was saved, and that run no code when they are read.

A save writes into a folder beside its final name, syncs every file, and then renames: whoever reads
finds the whole checkpoint or the one before. ``latest`` is written last, the same way.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from deepspeed_pulse.engine.checkpoints.claim import LOCK_FILE, claim, claimed
from deepspeed_pulse.engine.checkpoints.digests import HashedFile, Verifier
from deepspeed_pulse.engine.checkpoints.reading import check_loads_again, load_safely
from deepspeed_pulse.engine.checkpoints.record import RECORD_FILE
from deepspeed_pulse.engine.checkpoints.removal import remove_beside
from deepspeed_pulse.errors import ConfigError, FileError
from deepspeed_pulse.ir.run import RUN_FILE

LATEST = "latest"
WRITING, REPLACED, REMOVED = ".writing", ".replaced", ".removed"
"""What a tag's folder is called while it is written, while another takes its place, and while it is removed."""

NO_TAGS = (WRITING, REPLACED, REMOVED)
"""What names of folders end with that are no checkpoints."""

EMA_FOLDER = "ema"
"""Of averaged weights, inside a checkpoint."""


class SafeCheckpointEngine(TorchCheckpointEngine):
    """Upstream's files: hashed and synced when written, verified and read without running code.

    :meth:`stage` reads what upstream will ask for; it is given out when all ranks have read theirs.

    ``got_on``: called when a file is written or read.
    """

    def __init__(self, config: Any = None, got_on: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._got_on = got_on
        self.digests: dict[str, str] = {}
        """Of the files this rank has saved since the owner emptied it, by name."""
        self.verifier = Verifier(None)
        self._staged: dict[Path, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        where = Path(path)
        check_loads_again(state_dict, where)
        file = HashedFile(where)
        try:
            super().save(state_dict, file)
        except Exception:
            if file.problem is None:
                raise
            raise OSError(file.problem.errno, file.problem.strerror, path) from file.problem
        finally:
            file.close()
        sync(where)
        self.digests[where.name] = file.digest
        self._got_on()

    def load(self, path: str, map_location: Any = None) -> Any:
        where = Path(path)
        return self._staged[where] if where in self._staged else self._read(where, map_location)

    def begin(self, sums: Mapping[str, str] | None) -> None:
        """Drop what was staged; from now on files are verified against these digests; None: written without."""
        self._staged.clear()
        self.verifier.close()
        self.verifier = Verifier(sums)

    def stage(self, paths: Iterable[Path]) -> None:
        """Read files now, and verify them in parallel; a :class:`FileError` where :func:`load_safely` has one."""
        paths = list(dict.fromkeys(paths))
        for path in paths:
            self.verifier.begin(path)
        for path in paths:
            self._staged[path] = self._read(path, "cpu")

    def _read(self, path: Path, map_location: Any) -> Any:
        self.verifier.begin(path)
        try:
            content = load_safely(path, map_location)
        except FileError:
            if path.exists():
                self.verifier.check(path)  # says more
            raise
        self.verifier.check(path)
        self._got_on()
        return content


class CheckpointFolder:
    """``save_dir/tag`` while it is written and when it is there.

    One rank calls :meth:`prepare`, all ranks write into :attr:`writing` (a tag of its own), then that one calls
    :meth:`commit`, or :meth:`discard` when any of them failed.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str) -> None:
        self.save_dir, self.tag = Path(save_dir), tag
        self.writing = f"{tag}{WRITING}"
        """Tag under which the files are written."""
        self._final, self._written = self.save_dir / tag, self.save_dir / self.writing
        self._replaced = self.save_dir / f"{tag}{REPLACED}"
        self._latest = self.save_dir / LATEST

    def prepare(self) -> None:
        """Make room: what an unfinished save has left is dropped.

        Raises:
            FileError: another job saves here, or something stands in the way.
            OSError: the folder cannot be written to.
        """
        self.save_dir.mkdir(parents=True, exist_ok=True)
        claim(self.save_dir)
        for path in (self._final, self._written, self._replaced):
            if path.exists() and not path.is_dir():
                raise FileError(f"{path}: expected a folder or nothing, found a file; remove it or give another tag")
        if self._latest.is_dir():
            raise FileError(f"{self._latest}: expected a file or nothing, found a folder; remove it")
        if self._written.exists():
            shutil.rmtree(self._written)
        self._written.mkdir()

    def discard(self) -> None:
        """Drop what was written."""
        (self.save_dir / f"{LATEST}{WRITING}").unlink(missing_ok=True)
        shutil.rmtree(self._written, ignore_errors=True)

    def commit(self, *, save_latest: bool) -> None:
        """Give the written folder its name, then point ``latest`` to it.

        Whatever needs room on the disk is written before the first rename.
        """
        for folder in (*filter(Path.is_dir, self._written.rglob("*")), self._written):
            sync(folder)
        latest = beside(self._latest, self.tag) if save_latest else None
        if self._final.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            rename(self._final, self._replaced)
        rename(self._written, self._final)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if latest is not None:
            rename(latest, self._latest)

    def keep(self, limit: int) -> None:
        """Of the checkpoints whose tags differ from this one in the number at their end, keep the last ``limit``.

        Called when this one is there; it stays, and so does the one that ``latest`` names. A folder loses its name
        before its files, so what has a name is whole. Files go in a thread (:func:`remove_beside`), with what a process
        that died has left of others. An :class:`OSError` says that one keeps its name.
        """
        stays = {self.tag, find_tag(self.save_dir, None)}
        # by time: a run that goes on from an earlier step overtakes numbers that are there
        found = sorted(
            filter(self._is_alike, self.save_dir.iterdir()), key=lambda path: (path / RECORD_FILE).stat().st_mtime_ns
        )
        try:
            for path in [path for path in found if path.name not in stays][: max(0, len(found) - limit)]:
                rename(path, self._name_of_removed(path.name))
        finally:
            remove_beside(self.save_dir, f"*{REMOVED}")

    def _name_of_removed(self, tag: str) -> Path:
        """One that is free: files of an earlier checkpoint with this tag may still be there."""
        names = (f"{tag}{f'.{again}' if again else ''}{REMOVED}" for again in itertools.count())
        return next(path for path in map(self.save_dir.joinpath, names) if not path.exists())

    def _is_alike(self, path: Path) -> bool:
        """True for a whole checkpoint of the same series: ``step20`` beside ``step10``."""
        mine, other = (re.sub(r"\d+$", "#", tag) for tag in (self.tag, path.name))
        return mine == other and (path / RECORD_FILE).is_file()

    def recover(self) -> None:
        """A save that died between its two renames left the old checkpoint under another name: take it back."""
        if self._replaced.is_dir() and not self._final.exists():
            with claimed(self.save_dir):
                if not self._final.exists():  # the save of another job may have ended meanwhile
                    rename(self._replaced, self._final)


def check_tag(tag: str) -> None:
    """Raise a :class:`ConfigError` for a tag that is no name of one folder, or one with a meaning of its own there."""
    taken = tag in (LATEST, "latest_universal", LOCK_FILE, RUN_FILE) or tag.endswith(NO_TAGS)
    if not tag.strip() or tag in (".", "..") or taken or any(c in tag for c in "/\\\0\n\r"):
        raise ConfigError(
            f"tag: expected the name of one folder, found {tag!r}: no path, not empty, and not {LATEST!r} or another "
            'name that has its own meaning there; for example "step100"'
        )


def find_tag(load_dir: str | os.PathLike[str], tag: Any, named_by: str = LATEST) -> str | None:
    """The tag given, or the one that the file ``named_by`` names; None when there is neither.

    Raises:
        ConfigError: the tag is no name.
        FileError: ``latest`` names none, or a file stands where the folder should be.
    """
    if tag is not None:
        check_tag(str(tag))
        return str(tag)
    if Path(load_dir).exists() and not Path(load_dir).is_dir():
        raise FileError(f"{load_dir}: expected a folder of checkpoints, found a file")
    latest = Path(load_dir) / named_by
    if not latest.exists():
        return None
    try:
        found = latest.read_text(encoding="utf-8").strip()
        check_tag(found)
    except (ConfigError, OSError, UnicodeDecodeError) as problem:
        raise FileError(
            f"{latest}: expected the tag of a checkpoint, cannot use it: {problem}; give the tag yourself"
        ) from None
    return found


def beside(path: Path, text: str) -> Path:
    """A small file on disk beside its final name."""
    found = path.with_name(f"{path.name}{WRITING}")
    found.write_text(text, encoding="utf-8")
    sync(found)
    return found


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
