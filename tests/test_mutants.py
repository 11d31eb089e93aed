"""Do the tests notice? Mutants of the planner and the runtime, drawn at random, must make some test fail.

`MUTANTS=` and `SEED=` change the draw; the table of who survived is out/mutants.txt.
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

ROOT = Path(__file__).parents[1]
COUNT, SEED = int(os.environ.get("MUTANTS", 200)), int(os.environ.get("SEED", 20))
TESTS = (
    "tests/planner",
    "tests/runtime",
    "tests/ir",
    "tests/report",
    *sorted(f"tests/{path.name}" for path in ROOT.glob("tests/test_cli*.py")),
)
LIMIT_SECONDS, TEST_SECONDS = 1800, 280
"""Of all tests of a mutant, and of one: a mutant may well run for ever."""


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_mutants_are_noticed(tmp_path: Path) -> None:
    from support.mutants import draw

    trees = SimpleQueue[Path]()
    for name in ("one", "two"):
        trees.put(copied_to(tmp_path / name))
    covered = who_covers(tmp_path)
    package = ROOT / "deepspeed_pulse"
    mutants = draw([*package.glob("planner/**/*.py"), *package.glob("runtime/**/*.py")], COUNT, SEED)

    def survives(mutant: Any) -> bool:
        names = covering(mutant, covered)
        tree = trees.get()
        try:
            found = noticed_by(mutant, tree, names) if names else ""
        finally:
            trees.put(tree)
        print(f"{mutant} ({len(names)} tests): {found or 'SURVIVED'}", flush=True)
        return not found

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(survives, mutants))
    survivors = [str(mutant) for mutant, lives in zip(mutants, outcomes, strict=True) if lives]
    out = ROOT / "out"
    out.mkdir(exist_ok=True)
    text = "\n".join([f"{COUNT - len(survivors)} of {COUNT} mutants killed, seed {SEED}; survivors:", *survivors, ""])
    (out / "mutants.txt").write_text(text)
    assert len(survivors) <= COUNT // 10, text


def copied_to(tree: Path) -> Path:
    """A copy of what the tests need, to be changed."""
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__", ".*_cache", ".hypothesis")
    )
    return tree


def who_covers(folder: Path) -> dict[str, Any]:
    """The tests that run each line."""
    where = folder / "covered.json"
    done = run_tests(ROOT, TESTS, COVERED=str(where))
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


def noticed_by(mutant: Any, tree: Path, names: list[str]) -> str:
    """The test that fails, or that never ends; empty where none does."""
    changed = tree / mutant.path.relative_to(ROOT)
    changed.write_text(mutant.code())
    try:
        done = run_tests(tree, ("-x", f"--timeout={TEST_SECONDS}", *names))
    except subprocess.TimeoutExpired:
        return "no end"
    finally:
        shutil.copyfile(mutant.path, changed)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "SUBFAILED"))]
    return "" if done.returncode == pytest.ExitCode.OK else (failed or lines or ["died"])[-1][:160]


def run_tests(tree: Path, arguments: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest in a tree of its own, which its tests import."""
    paths = os.pathsep.join((str(tree), str(tree / "tests")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "support.covering", "-p", "no:cacheprovider", *arguments]
    limit = None if environment else LIMIT_SECONDS
    return subprocess.run(
        command,
        cwd=tree,
        env={**kept, "PYTHONPATH": paths, **environment},
        timeout=limit,
        capture_output=True,
        text=True,
    )
