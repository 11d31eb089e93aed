"""Saves that fail, fail on every rank with one line, and leave the folder as it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.damage_ranks import results
from support.launch import free_port, launch
from support.saving_ranks import LOADS, PARTIAL, SAVES

JOBS = [("pulse", {"ranks": 2}), ("ZeRO-1", {"ranks": 2, "zero": 1}), ("pulse off", {"ranks": 2, "off": True})]


def mounted(folder: Path) -> bool:
    """A small disk of its own, where this process may make one."""
    folder.mkdir()
    if os.geteuid() != 0:
        return False
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, timeout=60
    )
    return done.returncode == 0


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """None where no disk may be mounted: files of one rank then go to the kernel's full device only."""
    folder = tmp_path_factory.mktemp("disk") / "small"
    found = mounted(folder)
    try:
        yield folder if found else None
    finally:
        if found:
            subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None) -> dict[str, str]:
    disk = None if small_disk is None else str(small_disk)
    case = {"folder": str(tmp_path_factory.mktemp("saves")), "jobs": JOBS, "small disk": disk}
    (_, output), _ = launch("support.saving_ranks:refused_saves", 2, case, timeout=300, check=False)
    return results(output) | {"output": output}


CASES = [
    f"{label}: {name}" for label, _ in JOBS for name in (*SAVES, *LOADS, *PARTIAL, "a full disk", "glob characters")
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_a_save_or_load_that_cannot_be_is_refused_by_all_and_changes_nothing(
    case: str, found: dict[str, str], small_disk: Path | None
) -> None:
    if case.endswith(": a full disk") and small_disk is None:
        pytest.skip("no disk may be mounted here; one rank's full device is a case of its own")
    assert case in found, f"did not run:\n{found['output'][-3000:]}"
    assert found[case] == ""


def test_of_two_jobs_that_save_into_one_folder_the_second_is_told(tmp_path: Path) -> None:
    launch(
        "support.saving_ranks:two_jobs", 4, {"folder": str(tmp_path), "ports": [free_port(), free_port()]}, timeout=200
    )
