"""Ranks on the stand-in device of ``tests/standin``: what they need in their environment."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from standin import build

STANDIN = Path(build.__file__).parent


def needs_standin() -> pytest.MarkDecorator:
    """Skips, with a line that says so, where there is no compiler."""
    lacking = build.missing()
    return pytest.mark.skipif(lacking is not None, reason=lacking or "")


def environment(**settings: object) -> dict[str, str]:
    """Of a process that finds the stand-in as ``torch_npu``; builds the library where that has not been done.

    Args:
        settings: ``waits="nccl"``, ``kernel_delay_us=200`` and so on: see ``torch_npu``.
    """
    build.library()
    cann = Path(tempfile.gettempdir()) / "standin-cann"  # upstream looks for a folder, and for nothing in it
    cann.mkdir(exist_ok=True)
    return {
        "DS_ACCELERATOR": "npu",
        "ASCEND_HOME_PATH": str(cann),
        "PYTHONPATH": os.pathsep.join([str(STANDIN), str(STANDIN.parent), os.environ.get("PYTHONPATH", "")]),
        **{f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()},
    }
