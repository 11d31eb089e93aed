"""``deepspeed.initialize`` builds our engine for our module only; the patch makes the hook unnecessary."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import deepspeed
import pytest
from packaging.version import Version
from support.launch import launch

PATCHES = {
    Version(path.parent.name.removeprefix("deepspeed-")): path
    for path in (Path(__file__).parents[2] / "patches").glob("deepspeed-*/engine_class.patch")
}
PATCH = PATCHES[max(version for version in PATCHES if version <= max(min(PATCHES), Version(deepspeed.__version__)))]
"""Of the newest version that is not newer than the installed one; the oldest one's also before."""


def test_upstream_modules_behave_as_before_the_import() -> None:
    """Losses of PipelineModule, DualPipeVModule and of our module without names: bit for bit."""
    found = []
    for ours_too in (False, True):
        outputs = launch("support.hook_ranks:upstream_modules", 2, ours_too, timeout=200, without_us=True)
        lines = [line for _, output in outputs for line in output.splitlines() if line.startswith("FOUND")]
        found.append([json.loads(line.removeprefix("FOUND")) for line in lines])
    assert found[0] == found[1]
    engines = {name: row[-1] for name, row in found[0][0].items()}
    assert engines["PipelineModule"] == "PipelineEngine"
    assert engines.get("DualPipeVModule", "DualPipeVEngine") == "DualPipeVEngine"  # from 0.19.8 on


@pytest.mark.parametrize("patch", PATCHES.values(), ids=str)
def test_patch_is_small(patch: Path) -> None:
    changed = [line for line in patch.read_text().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 30


@pytest.mark.timeout(300)
def test_patched_upstream_needs_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(deepspeed.__file__).parent, tmp_path / "deepspeed")
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATCHED", str(tmp_path))
    case = {"model": "toy", "P": 2, "M": 3, "W": 1, "clip": 0.1, "enabled": True}
    for _, output in launch("support.hook_ranks:patched_upstream", 2, case, timeout=200):
        assert "PASSED" in output
