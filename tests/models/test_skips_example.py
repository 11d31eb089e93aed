"""examples/skips, as its first line says to run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.launch import launch

SCRIPT = Path(__file__).parents[2] / "examples" / "skips" / "train.py"


@pytest.mark.timeout(300)
def test_it_learns_and_sends_no_skip() -> None:
    (_, output), _ = launch("support.example_ranks:example", 2, [str(SCRIPT)], timeout=250)
    loss, sent = re.search(r"loss (\S+); sent between ranks: (.*)", output).groups()
    assert float(loss) < 0.1
    assert sent.split(", ") == ["hidden", "hidden_grad"]


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 40
