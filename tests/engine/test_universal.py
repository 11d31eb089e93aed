"""DeepSpeed's universal checkpoints: what we write is converted by its tool, and what that makes fits any plan."""

from __future__ import annotations

from pathlib import Path

from support.launch import launch


def test_universal_checkpoints_go_to_and_from_upstream_and_any_plan(tmp_path: Path) -> None:
    launch("support.universal_ranks:resumes", 4, str(tmp_path), timeout=280)
