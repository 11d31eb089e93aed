"""The site builds without a warning and is read without a network; pages that are made from code are whole."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT

import deepspeed_pulse
from deepspeed_pulse.cli.parser import make_parser
from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.ir.json_schema import FILES, file_name
from deepspeed_pulse.models import _LAZY as MODELS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.mark.timeout(250)
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = re.findall(r'(?:<script[^>]*\bsrc|<link[^>]*\bhref|<img[^>]*\bsrc)="(https?:[^"]*)"', page.read_text())
        assert not found, page


def test_pages_made_from_code_are_whole(site: Path) -> None:
    def page(name: str) -> str:
        return (site / "reference" / f"{name}.html").read_text()

    assert all(f'id="{key}"' in page("pulse_block") for key in PulseConfig.model_fields)
    commands = next(a for a in make_parser("")._actions if isinstance(a, argparse._SubParsersAction)).choices
    for name, command in commands.items():
        assert f'id="{name}"' in page("commands")
        assert all(
            f"<code>{o}</code>" in page("commands")
            for a in command._actions
            for o in a.option_strings[-1:]
            if o != "--help"
        )
    for file in FILES:
        assert file.FORMATS[0] in page("files") and (site / "reference" / "schemas" / file_name(file)).is_file()
    public = {f"{module}.{name}" for name, module in {**deepspeed_pulse._LAZY, **MODELS}.items()}
    assert not [name for name in sorted(public) if f'id="{name}"' not in page("api")]


def test_errors_have_their_sections(site: Path) -> None:
    page = (site / "errors.html").read_text()
    assert all(f'id="{name}"' in page for name in ("peererror", "too-few-layers", "memory", "no-partner"))
