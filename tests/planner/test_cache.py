"""Kept plans: found again by content, never wrong, and only where solving took time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.asked import asked
from toys import cluster, uniform

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.planner import cache, make_plan


def made(folder: Path, layers: int = 8, microbatches: int = 3, **options: object) -> Plan:
    arguments = {
        "cluster": cluster(),
        "pipeline_ranks": 2,
        "microbatches": microbatches,
        "solver_seconds": 5.0,
    } | options
    return make_plan(*asked(uniform(layers), **arguments), plan_cache=folder)


@pytest.fixture(autouse=True)
def every_plan_is_worth_keeping(monkeypatch):
    monkeypatch.setattr(cache, "WORTH_KEEPING_SECONDS", 0.0)


def test_the_same_question_is_answered_from_the_folder(tmp_path, monkeypatch):
    first = made(tmp_path / "new" / "folder")
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert Plan.load(file) == first
    monkeypatch.setattr("deepspeed_pulse.planner.make.best_plan", lambda *a: pytest.fail("made anew"))
    assert made(tmp_path / "new" / "folder") == first


def test_another_question_has_another_file(tmp_path):
    made(tmp_path)
    made(tmp_path, layers=9)
    made(tmp_path, microbatches=4)
    made(tmp_path, seed=1)
    made(tmp_path, split_backward=True)
    made(tmp_path, memory_bytes=10**9)
    made(tmp_path, cluster=cluster(ranks=2))
    assert len(list(tmp_path.iterdir())) == 7


def test_a_broken_file_is_made_anew(tmp_path):
    first = made(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:99])
    assert made(tmp_path) == first == Plan.load(file)


def test_quick_plans_and_generators_are_not_kept(tmp_path, monkeypatch):
    made(tmp_path, solver_seconds=0)
    monkeypatch.setattr(cache, "WORTH_KEEPING_SECONDS", 1e9)
    made(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"plan_cache: cannot keep plan-.* in .*file"):
        made(tmp_path / "file")
