"""Wheel and sdist: what is built installs into an empty environment and runs outside of the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import deepspeed_pulse

ROOT = Path(__file__).parents[1]
LIBRARIES = sysconfig.get_paths()["purelib"]
"""Where this environment has what the package needs; a new environment finds it there, the checkout's link not."""


def run(*command: str | Path, folder: Path) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, command)), cwd=folder, env=outside, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(kind: str, folder: Path) -> Path:
    """A copy of what git would take is built, so that nothing old lies beside it."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT).split("\0")
    copy = folder / "source"
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        if name.startswith("deepspeed_pulse/") or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    return folder / run(sys.executable, "-c", code, folder=copy).splitlines()[-1]


def inside(names: list[str]) -> set[str]:
    """Files of the package, without what stands before it."""
    found = (re.search(r"(?:^|/)(deepspeed_pulse/.*[^/])$", name) for name in names)
    return {match[1] for match in found if match and "egg-info" not in match[1] and "dist-info" not in match[1]}


def installed(archive: Path, folder: Path) -> Path:
    """The interpreter of an environment with the archive in it, and nothing else of its own."""
    venv.create(folder / "environment", with_pip=False)
    python = folder / "environment" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", folder=folder).strip())
    (site / "libraries.pth").write_text(f"{LIBRARIES}\n")
    run(*pip, "--no-build-isolation", archive, folder=folder)
    return python


def holds(python: Path, folder: Path) -> None:
    """The command, the module and what is shipped beside the code."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    where = run(python, "-c", "import deepspeed_pulse; print(deepspeed_pulse.__file__)", folder=elsewhere)
    assert Path(where.strip()).is_relative_to(folder / "environment")
    version = f"ds_pulse {deepspeed_pulse.__version__}\n"
    assert run(python.with_name("ds_pulse"), "--version", folder=elsewhere) == version
    assert run(python, "-m", "deepspeed_pulse", "--version", folder=elsewhere) == version
    assert "tune" in run(python.with_name("ds_pulse"), "--help", folder=elsewhere)


@pytest.mark.timeout(300)
def test_a_wheel_installs_and_runs(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path)
    names = inside(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "deepspeed_pulse"
    sources = {str(path.relative_to(ROOT)) for kind in ("*.py", "*.json", "py.typed") for path in package.rglob(kind)}
    assert names == sources
    holds(installed(wheel, tmp_path), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_an_sdist_installs_and_runs(tmp_path: Path) -> None:
    sdist = build("sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        assert {"deepspeed_pulse/py.typed", "deepspeed_pulse/schemas/pulse-plan-2.json"} <= inside(archive.getnames())
    holds(installed(sdist, tmp_path), tmp_path)
