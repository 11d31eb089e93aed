"""Which checkpoints stay under a limit: never fewer whole ones than asked for, whenever a removal is cut short."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from deepspeed_pulse.engine.checkpoints import files, removal
from deepspeed_pulse.engine.checkpoints.files import CheckpointFolder, find_tag
from deepspeed_pulse.engine.checkpoints.record import RECORD_FILE


def whole(folder: Path, *tags: str, latest: str | None = None) -> None:
    """Checkpoints, written one after the other."""
    for age, tag in enumerate(tags):
        (folder / tag).mkdir()
        (folder / tag / "layer_00-model_states.pt").write_text("")
        (folder / tag / RECORD_FILE).write_text("")
        os.utime(folder / tag / RECORD_FILE, ns=(age, age))
    if latest or tags:
        (folder / "latest").write_text(latest or tags[-1])


def names(folder: Path) -> list[str]:
    """What is there when all is deleted that is to be."""
    removal.wait()
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_last_written_of_the_series_stay(tmp_path):
    whole(tmp_path, "step9", "step10", "best", "global_step4", "step11")
    (tmp_path / "step8").mkdir()  # no checkpoint of ours
    CheckpointFolder(tmp_path, "step11").keep(2)
    assert names(tmp_path) == ["best", "global_step4", "step10", "step11", "step8"]
    CheckpointFolder(tmp_path, "best").keep(1)
    assert names(tmp_path) == ["best", "global_step4", "step10", "step11", "step8"]


def test_a_run_that_goes_on_from_an_earlier_step_overtakes(tmp_path):
    whole(tmp_path, "step10", "step20", "step30", "step15")
    CheckpointFolder(tmp_path, "step15").keep(2)
    assert names(tmp_path) == ["step15", "step30"]


def test_what_latest_names_stays(tmp_path):
    whole(tmp_path, "step1", "step2", "step3", latest="step1")
    CheckpointFolder(tmp_path, "step3").keep(1)
    assert names(tmp_path) == ["step1", "step3"]


@pytest.mark.parametrize("killed_at", ["rename", "rmtree"])
def test_a_removal_that_is_cut_short_leaves_whole_checkpoints_and_ends_with_the_next(tmp_path, monkeypatch, killed_at):
    whole(tmp_path, "step1", "step2", "step3")

    def killed(path: Path, *_: object) -> None:
        if killed_at == "rename":
            raise KeyboardInterrupt
        (path / RECORD_FILE).unlink()

    end = pytest.raises(KeyboardInterrupt) if killed_at == "rename" else nullcontext()
    with monkeypatch.context() as patched, end:
        patched.setattr(*((files, "rename") if killed_at == "rename" else (shutil, "rmtree")), killed)
        CheckpointFolder(tmp_path, "step3").keep(2)
        removal.wait()
    assert [name for name in names(tmp_path) if name.startswith("step") and not name.endswith(".removed")] == (
        ["step1", "step2", "step3"] if killed_at == "rename" else ["step2", "step3"]
    )
    CheckpointFolder(tmp_path, "step3").keep(2)
    assert names(tmp_path) == ["step2", "step3"]


def test_training_goes_on_while_files_are_deleted_and_a_tag_may_come_again(tmp_path, monkeypatch):
    go_on, rmtree = threading.Event(), shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: go_on.wait() and rmtree(path))
    whole(tmp_path, "step1", "step2")
    CheckpointFolder(tmp_path, "step2").keep(1)
    whole(tmp_path, "step1", latest="step2")
    CheckpointFolder(tmp_path, "step2").keep(1)
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == ["step1.1.removed", "step1.removed", "step2"] and find_tag(tmp_path, None) == "step2"
    go_on.set()
    assert names(tmp_path) == ["step2"]


def test_what_cannot_be_deleted_is_told_and_tried_again(tmp_path, monkeypatch, capsys):
    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    whole(tmp_path, "step1", "step2")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fails)
        CheckpointFolder(tmp_path, "step2").keep(1)
        assert names(tmp_path) == ["step1.removed", "step2"]
    assert "step1.removed: an older checkpoint is not deleted: [Errno 13]" in capsys.readouterr().out
    CheckpointFolder(tmp_path, "step2").keep(1)
    assert names(tmp_path) == ["step2"]
