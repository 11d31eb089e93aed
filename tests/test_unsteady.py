"""`make test` forgives a test that fails beside others and passes alone, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import TESTS

ONCE = """
from pathlib import Path

import pytest

def first_time(name):
    path = Path(name)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return path.read_text() == "x"

def test_steady():
    pass

def test_once():
    assert not first_time("once"), "too busy"

@pytest.fixture
def moody():
    yield
    assert not first_time("moody"), "left behind"

def test_with_a_moody_fixture(moody):
    pass
"""
ALWAYS = "def test_always(): assert False\ndef test_before(): pass"
CRASHES = "import os\ndef test_crash(): os._exit(3)"
CRASHES_BESIDE_OTHERS = """
import os

def test_crash():
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(3)

def test_behind():
    pass
"""
CRASHES_ONCE = """
import os
from pathlib import Path

def test_crash():
    if not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(3)

def test_behind():
    pass
"""


def run(folder: Path, *flags: str, **files: str) -> tuple[int, str, str]:
    """Exit status, output and closing line of pytest on a suite of these files."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -m 'not soak'\nmarkers = soak")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "support.unsteady", *flags]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stdout.splitlines()[-1]


PARALLEL = ("-p", "xdist.plugin", "-n", "2", "--dist", "loadfile", "--max-worker-restart", "1")


def test_what_passes_alone_is_unsteady_and_forgiven(tmp_path: Path) -> None:
    status, output, closing = run(tmp_path, *PARALLEL, once=ONCE, crash=CRASHES_ONCE)
    assert status == 0, output
    assert closing.startswith("5 passed, 3 unsteady in "), output
    assert "UNSTEADY test_once.py::test_once\n" in output and "too busy" in output
    assert "UNSTEADY test_once.py::test_with_a_moody_fixture\n" in output and "left behind" in output
    assert "UNSTEADY test_crash.py::test_crash\n" in output and "crashed while running" in output
    assert (tmp_path / "once").read_text() == "xx", "once more, not until it passes"


def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    status, output, closing = run(tmp_path, always=ALWAYS, once=ONCE)
    assert status == 1
    assert closing.startswith("1 failed, 4 passed, 2 unsteady in "), output
    assert "UNSTEADY test_once.py::test_once\n" in output and "UNSTEADY test_always" not in output


def test_nothing_is_said_of_a_steady_suite(tmp_path: Path) -> None:
    status, output, closing = run(tmp_path, steady="def test_it(): pass")
    assert (status, closing.split(" in ")[0]) == (0, "1 passed") and "alone" not in output


@pytest.mark.soak
def test_an_error_while_collecting_fails_the_run(tmp_path: Path) -> None:
    status, output, _ = run(tmp_path, *PARALLEL, broken="import no_such_module", steady="def test_it(): pass")
    assert status != 0 and "no_such_module" in output


@pytest.mark.soak
def test_a_crash_alone_too_fails_the_run(tmp_path: Path) -> None:
    status, output, _ = run(tmp_path, *PARALLEL, crash=CRASHES, once=ONCE)
    assert status == 1 and "UNSTEADY test_crash" not in output and "UNSTEADY test_once" in output, output


@pytest.mark.soak
def test_tests_that_never_ran_fail_the_run(tmp_path: Path) -> None:
    status, output, _ = run(tmp_path, *PARALLEL, crash=CRASHES_BESIDE_OTHERS)
    assert status == 1 and "some tests never ran" in output, output
