"""Saving: upstream's files, whole or absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_pulse.engine.checkpoints import averages
from deepspeed_pulse.engine.checkpoints.digests import SUMS_FILE, digest_of, write_sums
from deepspeed_pulse.engine.checkpoints.files import CheckpointFolder, check_tag, sync
from deepspeed_pulse.engine.checkpoints.reading import RECORD, check_client_state
from deepspeed_pulse.engine.checkpoints.record import CHOICE_FILE, PLAN_FILE, RECORD_FILE, CheckpointRecord
from deepspeed_pulse.engine.collectives import everywhere, told_by_all
from deepspeed_pulse.engine.plans.pinned import pinned
from deepspeed_pulse.errors import ConfigError, FileError, PulseError
from deepspeed_pulse.ir.fields import write_json


class Saving:
    """Saves an engine's state; ``write``: upstream's ``save_checkpoint`` of it."""

    def __init__(self, engine: Any, write: Callable[..., Any]) -> None:
        self._engine, self._write = engine, write
        self._problem: Exception | None = None
        """What this rank met while upstream wrote."""
        self.last: tuple[Any, dict[str, Any]] | None = None
        """Folder and options of the last save, for a run that is asked to stop."""

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any,
        client_state: dict[str, Any] | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
        ema: Any,
        limit: int | None,
    ) -> None:
        """As the engine's ``save_checkpoint``."""
        engine = self._engine
        engine.module.check_usable("save_checkpoint")
        client_state = {} if client_state is None else client_state
        folder = self._checked_folder(save_dir, tag, client_state, ema, limit)
        record = CheckpointRecord.of(engine)
        leader = engine.global_rank == 0

        def on_leader(act: Callable[[], Any]) -> None:
            everywhere(lambda: _writing(folder.save_dir, act) if leader else None, f"saving {folder.save_dir}")

        on_leader(folder.prepare)
        engine.module.ranks.got_on()  # another job's end may have been waited for
        try:
            kept = {**client_state, RECORD: replace(record, parameters=()).to_json()}
            digests = self._write_files(folder, kept, exclude_frozen_parameters)
            averages.save(ema, folder.save_dir / folder.writing)
            on_leader(lambda: self._write_record(folder, record, digests))
            on_leader(lambda: folder.commit(save_latest=save_latest))
        except PulseError:
            if leader:
                folder.discard()
            raise
        if leader and engine.save_zero_checkpoint:
            engine.write_recovery_script(save_dir)
        if leader and limit is not None:
            try:
                folder.keep(limit)
            except (OSError, FileError) as problem:  # the new one is there whatever happens to old ones
                print(f"pulse: warning: {folder.save_dir}: older checkpoints are not removed: {problem}", flush=True)
        self.last = (
            save_dir,
            {
                "client_state": client_state,
                "exclude_frozen_parameters": exclude_frozen_parameters,
                "ema": ema,
                "checkpoints_total_limit": limit,
            },
        )

    def _checked_folder(self, save_dir: Any, tag: Any, client_state: Any, ema: Any, limit: Any) -> CheckpointFolder:
        """Nothing is touched before every rank's arguments are known to be good, and the same tag."""

        def check() -> tuple[str, str]:
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ConfigError(
                    f"checkpoints_total_limit: expected a number of checkpoints >= 1 or None, found {limit!r}"
                )
            if not isinstance(save_dir, (str, os.PathLike)) or not os.fspath(save_dir):
                raise ConfigError(f"save_checkpoint: save_dir: expected a folder, found {save_dir!r}")
            name = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
            check_tag(name)
            check_client_state(client_state)
            averages.listed(ema)
            return os.fspath(save_dir), name

        mine = everywhere(check, "save_checkpoint")
        given = f"folder {mine[0]!r}, tag {mine[1]!r}, {averages.in_words(ema)}"
        self._engine.module.ranks.check_alike(given, "save_checkpoint")
        return CheckpointFolder(*mine)

    def _write_files(self, folder: CheckpointFolder, state: dict[str, Any], exclude: bool) -> dict[str, str]:
        """Upstream's files of all ranks; their digests by name."""
        self._problem = None
        self._engine.module.checkpoint_parallel_write_pipeline = True
        self._engine.checkpoint_engine.digests.clear()
        self._write(str(folder.save_dir), folder.writing, state, False, exclude)
        everywhere(lambda: _writing(folder.save_dir, self._raise_problem), f"saving {folder.save_dir}")
        told = told_by_all(self._engine.checkpoint_engine.digests)
        return {name: digest for digests in told for name, digest in digests.items()}

    def keep_problem(self, write: Callable[[], None]) -> None:
        """One of upstream's parts of a save: what goes wrong is kept until all ranks meet, and no more is written."""
        if self._problem is None:
            try:
                write()
            except Exception as problem:
                self._problem = problem

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _write_record(self, folder: CheckpointFolder, record: CheckpointRecord, digests: dict[str, str]) -> None:
        where, engine, module = folder.save_dir / folder.writing, self._engine, self._engine.module
        (where / RECORD_FILE).write_text(record.to_json(), encoding="utf-8")
        if module.plan is not None:
            (where / PLAN_FILE).write_text(module.plan.to_json(), encoding="utf-8")
        if module.job.chosen is not None:
            plan = folder.save_dir.resolve() / folder.tag / PLAN_FILE
            text = write_json(pinned(engine.config, module.job.chosen, str(plan)))
            (where / CHOICE_FILE).write_text(text, encoding="utf-8")
        there = {path.name for path in where.iterdir() if path.is_file()}
        missing = sorted(digests.keys() - there)
        if missing:
            raise FileError(
                f"{where}: expected the files of all ranks, {len(missing)} are not seen by rank 0, the first is "
                f"{missing[0]}; save into a folder that all machines share"
            )
        write_sums(where, {name: digests.get(name) or digest_of(where / name) for name in there})
        for name in (there - digests.keys()) | {SUMS_FILE}:
            sync(where / name)


def _writing(folder: Path, act: Callable[[], Any]) -> None:
    try:
        act()
    except OSError as problem:
        raise FileError(
            f"{problem.filename or folder}: the checkpoint cannot be written: {problem.strerror or problem}; "
            f"{folder} holds what it held before; make room there, or name another folder"
        ) from problem
