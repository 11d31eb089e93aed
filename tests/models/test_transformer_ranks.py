"""Families on real ranks: pairs as hidden state, tuples as named values and batch entries, several outputs."""

from __future__ import annotations

from support.launch import launch
from support.transformer_ranks import CASES


def test_training_on_two_ranks_equals_one_process(tmp_path):
    output = launch("support.transformer_ranks:trains", 2, str(tmp_path))
    assert str(output).count("PASSED") == 2 * len(CASES)
