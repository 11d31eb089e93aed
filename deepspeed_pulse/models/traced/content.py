"""All that the results of a model's leaves depend on, as plain data: the name of a kept trace is a hash of it."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_pulse.models.traced.batch import Given
from deepspeed_pulse.models.traced.built import built, is_plain
from deepspeed_pulse.models.traced.outline import Outline

TRACER_VERSION = 3
"""Raised when traces change, so that kept ones are not used any more."""

_INSTALLED = ("site-packages", "dist-packages")


def file_of(
    folder: str | os.PathLike[str], model: nn.Module, outline: Outline, given: Given, *options: Any
) -> Path | None:
    """Where a trace is kept; None for a model that cannot be told from another one.

    That is one whose code lies in no file (a notebook), or that holds objects which cannot be looked into.
    """
    told = tuple(built(name, part) for name, part in model.named_modules())
    sources = _sources(model)
    if sources is None or not is_plain(told):
        return None
    content = (
        ("versions", TRACER_VERSION, platform.python_version(), torch.__version__, *_installed()),
        ("model", told, [(name, p.requires_grad) for name, p in model.named_parameters()]),
        ("outline", sorted(outline.opened), sorted(outline.items), outline.whole),
        ("given", [(one, str(one.spec)) for one in given.entries], given.first, given.positional, given.empty),
        ("absent", given.absent),
        ("options", options, torch.get_default_dtype()),
        ("sources", [(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(sources)]),
    )
    return Path(folder) / f"model-trace-{hashlib.sha256(repr(content).encode()).hexdigest()[:32]}.json"


def _sources(model: nn.Module) -> set[Path] | None:
    """Files of the classes, and of all loaded modules that are not installed; None for a class without a file."""
    found = {
        Path(file) for file in map(_file, list(sys.modules.values())) if file is not None and not _is_installed(file)
    }
    for kind in {base for part in model.modules() for base in type(part).__mro__}:
        if kind.__module__ != "builtins" and not kind.__module__.startswith(("torch.", "abc", "typing")):
            file = _file(sys.modules.get(kind.__module__))
            if file is None:
                return None
            found.add(Path(file))
    return found


def _file(module: Any) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") and os.path.exists(file) else None


def _is_installed(file: str) -> bool:
    standard = str(Path(os.__file__).parent)
    return file.startswith(standard) or any(name in Path(file).parts for name in _INSTALLED)


def _installed() -> Iterator[str]:
    """Names and versions of all installed packages, as their folders are called."""
    for entry in sorted({entry for entry in sys.path if os.path.isdir(entry)}):
        yield from sorted(name for name in os.listdir(entry) if name.endswith((".dist-info", ".egg-info")))
