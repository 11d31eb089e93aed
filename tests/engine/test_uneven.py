"""Ranks that differ in what they use, keep or begin with train as if they did not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import launch_each
from support.uneven_ranks import PRECISIONS

CASES = [
    *(["weights that one replica uses", precision] for precision in PRECISIONS),
    ["copies of a tied weight", "fp16"],
    *(["clipping after a load", precision] for precision in PRECISIONS),
    *(["back to the start", precision] for precision in PRECISIONS),
    ["data after a load", "fp32"],
    *(["a refused batch", mode] for mode in ("together", "each")),
    ["frozen for a while", "fp32"],
    ["an end outside of autocast", "bf16"],
    *(["a rank without a backbone", precision] for precision in ("fp32", "bf16")),
]


@pytest.mark.timeout(400)
def test_ranks_that_differ(subtests: pytest.Subtests, tmp_path: Path) -> None:
    arguments = {"cases": CASES, "folder": str(tmp_path)}
    launch_each(subtests, "support.uneven_ranks:run", 2, CASES, arguments, timeout=300)
