"""``deepspeed.initialize`` builds our engine for our module only; the patch makes the hook unnecessary."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from pathlib import Path

import deepspeed
import pytest
from support.launch import launch

from deepspeed_pulse.engine import upstream

PATCH = Path(__file__).parents[2] / "patches" / f"deepspeed-{upstream.REQUIRED_VERSION}" / "engine_class.patch"


def test_every_upstream_name_relied_on_exists() -> None:
    for path, names in upstream.RELIED_ON.items():
        try:
            owner = importlib.import_module(path)
        except ModuleNotFoundError:
            module, _, name = path.rpartition(".")
            owner = getattr(importlib.import_module(module), name)
        missing = [name for name in names if not hasattr(owner, name)]
        assert not missing, (path, missing)


def test_upstream_modules_behave_as_before_the_import() -> None:
    """Losses of PipelineModule, DualPipeVModule and of our module without names: bit for bit."""
    found = []
    for ours_too in (False, True):
        outputs = launch("support.hook_ranks:upstream_modules", 2, ours_too, timeout=200)
        lines = [line for _, output in outputs for line in output.splitlines() if line.startswith("FOUND")]
        found.append([json.loads(line.removeprefix("FOUND")) for line in lines])
    assert found[0] == found[1]
    assert found[0][0]["DualPipeVModule"][-1] == "DualPipeVEngine"
    assert found[0][0]["PipelineModule"][-1] == "PipelineEngine"


def test_patch_is_small() -> None:
    changed = [line for line in PATCH.read_text().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 30


@pytest.mark.timeout(300)
def test_patched_upstream_needs_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(deepspeed.__file__).parent, tmp_path / "deepspeed", ignore=shutil.ignore_patterns("*.pyc"))
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATCHED", str(tmp_path))
    case = {"model": "toy", "P": 2, "M": 3, "W": 1, "clip": 0.1, "enabled": True}
    for _, output in launch("support.hook_ranks:patched_upstream", 2, case, timeout=200):
        assert "PASSED" in output
