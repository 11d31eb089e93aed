"""Every snippet of README and site is run as its page shows it, with the page's own command lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import launch_each
from support.launch import free_port
from support.pages import ROOT, name_of, pages, ranks_of, steps

PAGES = {name_of(page): ranks_of(page) for page in pages() if any(step.file for step in steps(page))}
"""Those with programs, by the ranks that they run on; None for one process."""

COMMANDS = sorted(name_of(page) for page in pages() if any(step.text.startswith("ds_pulse ") for step in steps(page)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_pages_run_on_ranks(subtests: pytest.Subtests, tmp_path: Path, ranks: int) -> None:
    cases = [name for name, needed in PAGES.items() if (needed or 2) == ranks]
    arguments = {"pages": cases, "folder": str(tmp_path)}
    launch_each(subtests, "support.page_ranks:follows", ranks, cases, arguments, timeout=600)


def test_every_page_runs_somewhere() -> None:
    assert set(PAGES.values()) <= {None, 2, 4}
    assert {"README.md", "docs/tutorial.md"} <= set(PAGES)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted({*PAGES, *COMMANDS}))
def test_a_page_runs_from_a_shell(tmp_path: Path, name: str) -> None:
    """The command lines themselves, in an empty folder."""
    tools = Path(sys.executable).parent
    port = f"deepspeed --master_port {free_port()} --num_accelerators"
    outside = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for step in steps(ROOT / name):
        if step.file is not None:
            (tmp_path / step.file).write_text(step.text)
        elif step.words[0] in ("deepspeed", "ds_pulse", "python") and "pytest" not in step.words:
            line = step.text.replace("deepspeed --num_accelerators", port)
            line = line.replace("ds_pulse ", f"{sys.executable} -m deepspeed_pulse ", 1)
            done = subprocess.run(
                line, shell=True, cwd=tmp_path, env=outside, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, f"{name}:{step.line}: {step.text}\n{done.stdout}{done.stderr}"
