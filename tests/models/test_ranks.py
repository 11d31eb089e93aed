"""Loading and saving with real ranks."""

from __future__ import annotations

from support.launch import launch


def test_saved_from_ranks_in_each_precision(tmp_path):
    launch("support.model_ranks:saves", 4, str(tmp_path))
