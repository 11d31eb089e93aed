"""What ranks run in the test of traces that are kept: they start at once with the same folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from support.cases import run_each
from support.plain_nets import DoubleConv, Odd, PlainLevel, plain_unet_batch

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.models import to_layers
from deepspeed_pulse.models.traced import keeping

CASES = ["one traces", "all are refused", "one fails alone"]
LONGEST = 60.0


class Start:
    """One start of all ranks: who has come to the folder, and whose blocks ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran = folder, 0
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        folder.mkdir(exist_ok=True)
        torch.distributed.barrier()

    def arrived(self) -> None:
        (self.folder / f"arrived-{self.rank}").touch()

    def wait_for_all(self) -> None:
        """So that each of the others stands before the lock while this rank holds it."""
        end = time.monotonic() + LONGEST
        while len(list(self.folder.glob("arrived-*"))) < self.world:
            assert time.monotonic() < end, "another rank never came"
            time.sleep(0.01)

    def kept(self) -> list[Path]:
        torch.distributed.barrier()
        return list(self.folder.glob("model-trace-*"))

    def told(self, mine: Any) -> list[Any]:
        """By all ranks."""
        found: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(found, mine)
        return found


def starts(arguments: dict[str, Any]) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    keeping.WORTH_KEEPING_SECONDS = 0.0
    run_each(arguments["cases"], lambda name: run(name, Path(arguments["folder"]) / name.replace(" ", "-")))


def run(name: str, folder: Path) -> None:
    start, wait, forward = Start(folder), keeping._wait, DoubleConv.forward

    def arriving(*args: Any) -> None:
        start.arrived()
        wait(*args)

    def counted(block: DoubleConv, hidden: torch.Tensor) -> torch.Tensor:
        start.wait_for_all()
        start.ran += 1
        if name == "one fails alone" and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise OSError("no space left on this rank")
        return forward(block, hidden)

    keeping._wait, DoubleConv.forward = arriving, counted  # type: ignore[method-assign]
    try:
        {"one traces": one_traces, "all are refused": all_are_refused, "one fails alone": one_fails}[name](start)
    finally:
        keeping._wait, DoubleConv.forward = wait, forward  # type: ignore[method-assign]


def one_traces(start: Start) -> None:
    """And the others read what it kept: no block of theirs runs, and the layers are the same."""
    layers = to_layers(PlainLevel(), example_batch=plain_unet_batch(), plan_cache=start.folder)
    ran = start.told(start.ran)
    assert sorted(bool(count) for count in ran) == [False] * (start.world - 1) + [True], ran
    assert len(start.kept()) == 1
    codes = start.told(repr([code.signature for code in layers[0].layer.traced.base.codes]))
    assert len(set(codes)) == 1, codes


def all_are_refused(start: Start) -> None:
    """One after the other, with the same error; nothing is kept, and nobody waits for it."""
    try:
        to_layers(Odd("counts"), example_batch={"x": torch.ones(2, 8)}, plan_cache=start.folder)
        error = "none"
    except GraphError as problem:
        error = str(problem)
    errors = start.told(error)
    assert len(set(errors)) == 1 and "changes step in its forward" in error, errors
    assert not start.kept()


def one_fails(start: Start) -> None:
    """The next one traces in its place."""
    try:
        to_layers(PlainLevel(), example_batch=plain_unet_batch(), plan_cache=start.folder)
        error = "none"
    except GraphError as problem:
        error = str(problem)
    errors = start.told(error)
    assert sum("no space left on this rank" in one for one in errors) == 1, errors
    assert errors.count("none") == start.world - 1, errors
    assert len(start.kept()) == 1
