"""The table of docs/decisions.md: what each family's list is beside a trace of the same model, on the meta device.

PYTHONPATH=tests python tests/support/family_table.py     # some minutes; writes the table anew
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from support.every_family import FAMILIES as SMALL
from support.skips import long_skips

from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.catalogue.published import PUBLISHED
from deepspeed_pulse.models.catalogue.sources import build_model, example_batch
from deepspeed_pulse.models.families import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "decisions.md"
HEAD = (
    "| class | model | lines | layers (traced) | fine layers (traced) | long skips (traced) | start, s (traced) |\n"
    "|---|---|---|---|---|---|---|\n"
)


def models() -> Iterator[tuple[str, str, Any, Any]]:
    """Class, name, model and batch: of each family the first published one, else a small one."""
    names = {config["_class_name"]: name for name, config in reversed(PUBLISHED.items())}
    for kind in FAMILIES:
        if kind in names:
            model = build_model(PUBLISHED[names[kind]], dtype="bfloat16")
            yield kind, names[kind], model, example_batch(model, microbatch_size=2, dtype=torch.bfloat16)
        else:
            make, make_batch = SMALL[kind]
            yield kind, "small", make(), make_batch()


def row(kind: str, name: str, model: Any, batch: Any) -> str:
    module = importlib.import_module(f"deepspeed_pulse.models.{FAMILIES[kind]}")
    lines = len(Path(str(module.__file__)).read_text().splitlines())
    cells = [kind, name, str(lines)]
    known, seconds = timed(lambda: to_layers(model))
    traced, seconds_traced = timed(lambda: to_layers(model, example_batch=batch, trace=True))
    fine, _ = timed(lambda: to_layers(model, granularity="fine"))
    fine_traced, _ = timed(lambda: to_layers(model, granularity="fine", example_batch=batch, trace=True))
    cells += [f"{len(known)} ({told(traced, len)})", f"{len(fine)} ({told(fine_traced, len)})"]
    cells += [f"{skips(known)} ({told(traced, skips)})", f"{seconds:.1f} ({seconds_traced:.1f})"]
    return f"| {' | '.join(cells)} |"


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """What it makes, or why it does not; processor seconds."""
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = make()
        except Exception as problem:
            made = problem
    return made, time.process_time() - began


def told(layers: Any, what: Callable[[Any], Any]) -> str:
    if isinstance(layers, Exception):
        print(f"  {type(layers).__name__}: {layers}", file=sys.stderr)
        return "refused"
    return str(what(layers))


def skips(layers: Any) -> int:
    return len(long_skips(layers, range(len(layers))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for one in models():
        rows.append(row(*one))
        print(rows[-1], flush=True)
    before, _, after = PAGE.read_text().partition(HEAD)
    rest = after[after.find("\n\n") + 1 :] if after else ""
    PAGE.write_text(before + HEAD + "\n".join(rows) + "\n" + rest)
