"""Traced models on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import launch_each
from support.kept_trace_ranks import CASES as KEPT
from support.launch import launch
from support.traced_ranks import CASES, folder_model, large_model

QUICK = ["a plain U-Net", "names that layers have", "lists in the batch", "adapters in reentrant checkpoints"]


def test_training_on_two_ranks_equals_one_process(subtests: pytest.Subtests) -> None:
    arguments = {"cases": QUICK, "ranks": 2}
    launch_each(subtests, "support.traced_ranks:trains", 2, QUICK, arguments, timeout=300)


def test_one_rank_traces_and_the_others_read(subtests: pytest.Subtests, tmp_path: Path) -> None:
    arguments = {"cases": KEPT, "folder": str(tmp_path)}
    launch_each(subtests, "support.kept_trace_ranks:starts", 2, KEPT, arguments, timeout=300)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_one_process(subtests: pytest.Subtests, ranks: int) -> None:
    cases = list(CASES) if ranks == 2 else [name for name in CASES if name != "measured"]
    arguments = {"cases": cases, "ranks": ranks}
    launch_each(subtests, "support.traced_ranks:trains", ranks, cases, arguments, timeout=600)


@pytest.mark.soak
def test_a_folder_is_read_trained_and_written_by_layers(tmp_path: Path) -> None:
    folder_model()[1].save_pretrained(tmp_path / "folder")
    arguments = {"folder": str(tmp_path / "folder"), "out": str(tmp_path), "ranks": 4}
    for status, output in launch("support.traced_ranks:saves", 4, arguments, timeout=300):
        assert status == 0 and "PASSED" in output, output


@pytest.mark.soak
def test_a_rank_holds_its_share_of_a_folder(tmp_path: Path) -> None:
    large_model().save_pretrained(tmp_path / "large")
    arguments = {"large": str(tmp_path / "large")}
    for status, output in launch("support.traced_ranks:holds_its_share", 4, arguments, timeout=300):
        assert status == 0 and "PASSED" in output, output
        print(*(line for line in output.splitlines() if line.startswith("SHARE")), sep="\n")
