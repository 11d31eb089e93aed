"""``eval_batch``: upstream's options, several losses, and sampling between training steps."""

from __future__ import annotations

from pathlib import Path

from support.launch import launch


def test_options_give_what_upstream_documents(tmp_path: Path) -> None:
    """Several losses are averaged each."""
    launch("support.evaluation_ranks:on_four_ranks", 4, str(tmp_path), timeout=250)


def test_ranks_sample_together_between_training_steps() -> None:
    launch("support.evaluation_ranks:samples", 2, timeout=250)
