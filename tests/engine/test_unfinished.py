"""What backbones have left when their engine is gone is said once, by the first rank."""

from __future__ import annotations

import gc
import sys

import pytest

from deepspeed_pulse.engine.observation.unfinished import Unfinished


class Engine:
    def __init__(self, rank: int) -> None:
        self.global_rank = rank


@pytest.mark.parametrize(
    ("rank", "ended", "failed", "told"),
    [(0, False, False, 1), (1, False, False, 0), (0, True, False, 0), (0, False, True, 0)],
)
def test_it_is_told_unless_it_was_ended_or_the_script_failed(
    rank: int,
    ended: bool,
    failed: bool,
    told: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError() if failed else None, raising=False)
    engine = Engine(rank)
    unfinished = Unfinished(engine)
    unfinished.begin(["base", "upper"], 7)
    if ended:
        unfinished.end()
    del engine
    gc.collect()
    printed = capsys.readouterr().out
    assert printed.count("pulse: warning: backbones base and upper: step 7, the last one, is not ended") == told
    assert printed.count("engine.finish_backbones()") == printed.count("\n") == told
