"""What the engine does besides training steps: bytes, evaluation, microbatches, checkpoints, frozen ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.launch import launch


@pytest.mark.parametrize(("model", "world"), [pytest.param("toy", 2, marks=pytest.mark.soak), ("toy", 4), ("unet", 4)])
def test_skips_stay_on_their_rank(model: str, world: int) -> None:
    outputs = launch("support.engine_ranks:bytes_on_the_wire", world, model, timeout=200)
    ratio = re.search(r"RATIO relayed / wave = ([0-9.]+)", outputs[0][1])
    assert ratio is not None and float(ratio[1]) > 1.5
    print(f"{model}, {world} ranks: bytes relayed / wave = {ratio[1]}")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_evaluation_between_training_steps(world: int) -> None:
    launch("support.engine_ranks:evaluates", world, timeout=200)


def test_another_number_of_microbatches_plans_the_order_anew() -> None:
    launch("support.engine_ranks:changes_microbatches", 2, timeout=200)


def test_resume_is_exact(tmp_path: Path) -> None:
    launch("support.engine_ranks:resumes", 2, str(tmp_path), timeout=200)


def test_rank_without_trainable_parameters() -> None:
    launch("support.engine_ranks:trains_without_parameters", 2, timeout=200)


def test_trace_timelines_and_plan_cache(tmp_path: Path) -> None:
    launch("support.engine_ranks:traces", 2, str(tmp_path), timeout=200)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"0F0", "0B2"}
    assert len(list((tmp_path / "plans").glob("profile-*.json"))) == 1


def test_an_engine_that_was_let_go_keeps_no_memory_and_swallows_no_signal() -> None:
    launch("support.engine_ranks:makes_another", 2, timeout=200)
