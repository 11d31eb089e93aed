"""Many cases in one launch of ranks, each reported by its name: one that fails does not hide the others."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.launch import launch

LONGEST = 8000
"""Characters shown of what a rank wrote in a case."""


def run_each(cases: Iterable[Any], run: Callable[[Any], Any]) -> None:
    """On a rank: run all cases, whatever becomes of the ones before; the rank fails when one of them has."""
    failed = False
    for case in cases:
        print(f"CASE {case}", flush=True)
        try:
            run(case)
            print(f"PASSED {case}", flush=True)
        except Exception:
            failed = True
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
    if failed:
        raise SystemExit(1)


def launch_each(
    subtests: pytest.Subtests,
    target: str,
    world: int,
    cases: list[Any],
    arguments: Any = None,
    *,
    timeout: float,
    environment: dict[str, str] | None = None,
) -> list[str]:
    """Launch a program that ends in :func:`run_each` over these cases: a subtest for each, and the ranks' outputs.

    Args:
        arguments: of the program; the cases where left out.
        environment: set on the ranks.
    """
    found = launch(
        target, world, cases if arguments is None else arguments, timeout=timeout, check=False, environment=environment
    )
    outputs = [output for _, output in found]
    for case in json.loads(json.dumps(cases)):  # as the ranks read and name it
        with subtests.test(msg=str(case)):
            bad = {rank: _of(case, output) for rank, output in enumerate(outputs) if f"PASSED {case}\n" not in output}
            assert not bad, "\n".join(f"--- rank {rank}\n{text}" for rank, text in bad.items())
    assert all(status == 0 for status, _ in found), f"a rank failed outside its cases:\n{outputs[0][-LONGEST:]}"
    return outputs


def _of(case: Any, output: str) -> str:
    """What a rank wrote from the beginning of a case to that of the next."""
    _, begun, rest = output.partition(f"CASE {case}\n")
    if not begun:
        return f"never began it; it last wrote:\n{output[-LONGEST:]}"
    return rest.split("\nCASE ")[0][-LONGEST:]
