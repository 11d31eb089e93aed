"""The table of docs/any_model.md: every class of the zoo, traced and compared with its own forward.

PYTHONPATH=tests python tests/support/zoo_table.py     # writes the table anew; some minutes
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.traced import assert_equal
from support.zoo import SIZES, ZOO, Batch, output_of

from deepspeed_pulse.engine.specs import graph_of
from deepspeed_pulse.errors import BatchError, PulseError
from deepspeed_pulse.models import to_layers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "any_model.md"
HEAD = "| class | layers | long skips | result |\n|---|---|---|---|\n"


def row(name: str) -> str:
    """A line of the table."""
    model, batches = ZOO[name].model(name), [ZOO[name].example(size) for size in range(len(SIZES))]
    if not runs(model, batches[0]):
        return f"| {name} | | | not tried: this small configuration does not run |"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layers = to_layers(model, example_batch=batches[0])
        except PulseError as problem:
            return f"| {name} | | | refused: {shortly(problem, name)} |"
        result = compared(model, layers, *(one for one in batches if runs(model, one)))
    values = [value for value in graph_of(layers).values if value.source is not None and len(value.targets) == 1]
    skips = [value for value in values if value.targets[0] > value.source + 1]
    return f"| {name} | {len(layers)} | {len(skips)} | {result} |"


def compared(model: torch.nn.Module, layers: Sequence[Any], example: Batch, *others: Batch) -> str:
    """Raises where something is not equal; the list may refuse another size by name."""
    assert_equal(model, layers, example)
    for other in others:
        try:
            assert_equal(model, layers, other)
        except BatchError as problem:
            return f"equal; another size is refused: {str(problem).partition(';')[0]}"
    return "equal"


def runs(model: torch.nn.Module, batch: dict[str, object]) -> bool:
    """False for a class that takes one size only."""
    try:
        output_of(model, batch)
    except (RuntimeError, TypeError, NameError):
        return False
    return True


def shortly(problem: Exception, name: str) -> str:
    """What of an error says why, without this machine's paths."""
    text = str(problem).split(", and what it then does")[0].split(", so it")[0].removeprefix(f"{name} ")
    head, _, tail = text.partition(" at /")
    return f"{head} at {tail.rpartition('site-packages/')[2]}" if tail else head


def table(names: Iterable[str] = ZOO) -> str:
    return HEAD + "".join(f"{row(name)}\n" for name in sorted(names))


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(HEAD)[1] + PAGE.read_text().partition(HEAD)[2]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(made := table())
    PAGE.write_text(PAGE.read_text().partition(HEAD)[0] + made)
