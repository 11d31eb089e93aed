"""fp32, bf16 and fp16 under ZeRO 0 and 1, clipped and not, recomputed and not: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.launch import launch
from support.precision_cases import FACTORS, OFFLOADED, STATIC, pairs, pairwise, product
from support.precision_ranks import reference_name

ROWS = pairwise()


def test_rows_hold_every_pair() -> None:
    found = set().union(*map(pairs, ROWS))
    for a in FACTORS:
        for b in list(FACTORS)[list(FACTORS).index(a) + 1 :]:
            assert all(((a, x), (b, y)) in found for x in FACTORS[a] for y in FACTORS[b])


def rounds_of(rows: list[dict[str, Any]], folder: Path) -> list[list[Any]]:
    """References first, in two processes; then worlds of 2, 4 and 8 ranks."""

    def job(target: str, world: int, mine: list[dict[str, Any]]) -> list[Any]:
        return [f"support.precision_ranks:{target}", world, {"rows": mine, "folder": str(folder)}]

    alone = list({reference_name(row): row for row in rows}.values())
    worlds = [[job("compare", world, [row for row in rows if row["P"] * row["dp"] == world])] for world in (2, 4, 8)]
    return [[job("references", 1, alone[::2]), job("references", 1, alone[1::2])], *worlds]


@pytest.mark.timeout(600)
def test_every_precision_trains_as_in_one_process(tmp_path: Path) -> None:
    others = [
        ["support.precision_ranks:skips_together", 4, None],
        ["support.precision_ranks:changed_between_steps", 2, None],
        ["support.optimizer_ranks:optimizers", 2, None],
        ["support.precision_ranks:destroyed_once", 1, None],
    ]
    rounds = [*rounds_of([*ROWS, *OFFLOADED, *STATIC], tmp_path), others]
    _, output = launch("support.forked:run_jobs", 1, rounds, timeout=500)[0]
    assert output.count("ROUND") == len(rounds)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_whole_product_trains_as_in_one_process(tmp_path: Path) -> None:
    rounds = rounds_of([{**row, "whole": True} for row in product()], tmp_path)
    _, output = launch("support.forked:run_jobs", 1, rounds, timeout=3500)[0]
    assert output.count("ROUND") == len(rounds)


def test_data_of_another_precision_is_named() -> None:
    """Torch says that types differ, not which entry it is."""
    for _, output in launch("support.precision_ranks:other_precision", 2, None, timeout=100):
        (told,) = [line for line in output.splitlines() if line.startswith("TOLD")]
        assert "the weights are bfloat16, but not what is read of the data: t, the first layer's input; cast it" in told


def test_a_mean_of_many_losses_is_no_sum_that_stands_still() -> None:
    for _, output in launch("support.precision_ranks:many_losses", 2, None, timeout=100):
        assert "PASSED" in output
