"""Families on real ranks: pairs as hidden state, tuples as named values and batch entries, several outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import launch_each
from support.transformer_ranks import CASES


def test_training_on_two_ranks_equals_one_process(subtests: pytest.Subtests, tmp_path: Path) -> None:
    launch_each(subtests, "support.transformer_ranks:trains", 2, list(CASES), str(tmp_path), timeout=300)
