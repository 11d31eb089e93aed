"""Do the tests notice? Mutants of the planner and the runtime, drawn at random, must make some test fail.

`MUTANTS=` and `SEED=` change the draw, `MUTANTS=40:80` tries these of it alone, `WORKERS=1` one at a time;
out/mutants.txt says of each, as it comes, which test noticed it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from support.forking_pytest import ForkingPytest

ROOT = Path(__file__).parents[1]
FIRST, END = [0, *map(int, os.environ.get("MUTANTS", "200").split(":"))][-2:]
SEED, WORKERS = int(os.environ.get("SEED", 20)), int(os.environ.get("WORKERS", 2))
TESTS = (
    "tests/planner",
    "tests/runtime",
    "tests/ir",
    "tests/report",
    *sorted(f"tests/{path.name}" for path in ROOT.glob("tests/test_cli*.py")),
)
OPTIONS = ("-p", "support.covering", "-p", "no:cacheprovider", "-W", "ignore:Module already imported")
WRITTEN = ROOT / "out" / "mutants.txt"
LIMIT_SECONDS, TEST_SECONDS = 1800, 280
"""Of all tests of a mutant, and of one: a mutant may well run for ever."""


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_mutants_are_noticed(tmp_path: Path) -> None:
    from support.mutants import draw

    covered = who_covers(tmp_path)
    package = ROOT / "deepspeed_pulse"
    mutants = draw([*package.glob("planner/**/*.py"), *package.glob("runtime/**/*.py")], END, SEED)[FIRST:]
    WRITTEN.parent.mkdir(exist_ok=True)
    WRITTEN.write_text("")
    trees = SimpleQueue[tuple[Path, ForkingPytest]]()
    for number in range(WORKERS):
        tree = copied_to(tmp_path / f"tree{number}")
        trees.put((tree, ForkingPytest(tree)))

    def survives(mutant: Any) -> bool:
        names = covering(mutant, covered)
        tree, tests = trees.get()
        found = noticed_by(mutant, tree, tests, names) if names else ""
        trees.put((tree, tests))
        with WRITTEN.open("a") as file:
            file.write(f"{mutant} ({len(names)} tests): {found or 'SURVIVED'}\n")
        return not found

    with ThreadPoolExecutor(WORKERS) as pool:
        outcomes = list(pool.map(survives, mutants))
    for _ in range(WORKERS):
        trees.get()[1].end()
    survivors = [str(mutant) for mutant, lives in zip(mutants, outcomes, strict=True) if lives]
    killed = f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed, seed {SEED}"
    text = "\n".join([f"{killed}; survivors:", *survivors, ""])
    with WRITTEN.open("a") as file:
        file.write(text)
    assert len(survivors) <= len(mutants) // 10, text


def copied_to(tree: Path) -> Path:
    """A copy of what the tests need, to be changed."""
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__", ".*_cache", ".hypothesis")
    )
    return tree


def who_covers(folder: Path) -> dict[str, Any]:
    """The tests that run each line."""
    where = folder / "covered.json"
    command = [sys.executable, "-m", "pytest", *OPTIONS, *TESTS]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "COVERED": str(where)}, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.OK, f"the tests fail without a mutant:\n{done.stdout[-4000:]}"
    return with_breadth(json.loads(where.read_text()))


def with_breadth(lines: dict[str, Any]) -> dict[str, Any]:
    """The tests by file and line, and the number of lines that each runs in all."""
    rows = (names for file in lines.values() for names in file.values())
    return {"lines": lines, "breadth": Counter(name for names in rows for name in names)}


def covering(mutant: Any, covered: dict[str, Any]) -> list[str]:
    """The tests that run the mutant's line, first those that run little else; at import: all that run its file."""
    lines = covered["lines"].get(str(mutant.path), {})
    here = Counter(name for tests in lines.values() for name in tests)
    names = set(lines.get(str(mutant.line), ())) - {""} or set(here) - {""}
    return sorted(names, key=lambda name: -here[name] / covered["breadth"][name])


def noticed_by(mutant: Any, tree: Path, tests: ForkingPytest, names: list[str]) -> str:
    """The test that fails, or that there is no end; empty where none does."""
    changed = tree / mutant.path.relative_to(ROOT)
    changed.write_text(mutant.code())
    status, output = tests.run([*OPTIONS, "-x", f"--timeout={TEST_SECONDS}", *names], LIMIT_SECONDS)
    shutil.copyfile(mutant.path, changed)
    if status is None or status < 0:
        return "no end" if status is None else f"died of signal {-status}"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "SUBFAILED"))]
    assert status == pytest.ExitCode.OK or failed, output
    return failed[-1][:160] if failed else ""
