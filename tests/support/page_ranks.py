"""What the pages of the documentation say is done on forked ranks, page after page, each in a folder of its own."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import diffusers  # noqa: F401  once, before the ranks are forked
import torch
from support.cases import run_each
from support.pages import ROOT, Step, steps
from support.parity import measure_links_once

import deepspeed_pulse.models  # noqa: F401
from deepspeed_pulse import PipelineModule  # noqa: F401
from deepspeed_pulse.cli import main

NOT_DONE = ("export OMP_NUM_THREADS=", "make ", "pip install ", "python -m pytest ")
"""Command lines that install, set what is set here, or run what has tests of its own."""


def follows(arguments: dict[str, Any]) -> None:
    """Every page's files and command lines, in order: rank 0 does what one process does."""
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    measure_links_once()
    run_each(arguments["pages"], lambda page: _follow(page, Path(arguments["folder"])))


def _follow(page: str, folder: Path) -> None:
    own = folder / page.replace("/", "_")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    arguments, path, rng = list(sys.argv), list(sys.path), torch.get_rng_state()
    try:
        for step in steps(ROOT / page):
            print(f"{page}:{step.line}: {step.file or step.text}", flush=True)
            _alone(step) if step.ranks is None else _together(step)
    finally:
        sys.argv[:], sys.path[:] = arguments, path
        torch.set_rng_state(rng)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(own)):
                del sys.modules[name]


def _together(step: Step) -> None:
    """A script on the first ranks of the command line; all are in it."""
    script, *rest = step.words[3:]
    if step.ranks != int(os.environ["WORLD_SIZE"]):
        return
    sys.argv[:] = [script, f"--local_rank={os.environ['LOCAL_RANK']}", *rest]  # as DeepSpeed's launcher does
    sys.path.insert(0, os.getcwd())
    runpy.run_path(script, run_name="__main__")


def _alone(step: Step) -> None:
    """Rank 0 saves the file or runs the command; the others wait for how that ends."""
    told = [None]
    if torch.distributed.get_rank() == 0:
        told = [_done(step)]
    torch.distributed.broadcast_object_list(told)
    if told[0] is not None:
        raise AssertionError(told[0])


def _done(step: Step) -> str | None:
    """What went wrong. Commands run in this process, which has imported what they need."""
    if step.file is not None:
        Path(step.file).parent.mkdir(parents=True, exist_ok=True)
        Path(step.file).write_text(step.text)
        return None
    if step.text.startswith(NOT_DONE):
        return None
    command, *rest = step.words
    try:
        if command == "ds_pulse":
            status = main(rest)
            return f"status {status}: {step.text}" if status else None
        if command == "python":
            sys.argv[:] = rest
            sys.path.insert(0, os.getcwd())
            runpy.run_path(rest[0], run_name="__main__")
            return None
    except Exception:
        return traceback.format_exc()
    return f"a command that is not known here: {step.text}"
