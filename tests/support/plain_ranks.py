"""Upstream's plain ``PipelineModule`` beside ours: layer files written by one are read by the other.

Everything above :func:`pulse_reads_and_writes` runs without this package in the process.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.toy import WIDTH, Square, transposed
from support.versions import plain_microbatches
from torch import nn

BEFORE, AFTER = 2, 2
"""Optimizer steps before and after the checkpoint."""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": plain_microbatches(),
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
}


def layers_of(pipe: Any) -> list[Any]:
    """Ten layers without skips, two of them tied, by ``pipe``'s specs (upstream's or ours)."""
    return [
        pipe.LayerSpec(nn.Linear, WIDTH, WIDTH),
        pipe.TiedLayerSpec("square", Square),
        *[layer for _ in range(3) for layer in (pipe.LayerSpec(nn.Linear, WIDTH, WIDTH), pipe.LayerSpec(nn.Tanh))],
        pipe.TiedLayerSpec("square", Square, forward_fn=transposed),
        pipe.LayerSpec(nn.Linear, WIDTH, 3),
    ]


def engine_of(pipe: Any, *, seed: int = 1234, pulse: Any = None, **arguments: Any) -> Any:
    """SGD without momentum: weights are all the state there is."""
    import deepspeed

    deepspeed.init_distributed()
    config = CONFIG if pulse is None else {**CONFIG, "pulse": pulse}
    module = pipe.PipelineModule(
        layers=layers_of(pipe),
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        seed_layers=True,
        base_seed=seed,
        **arguments,
        **({} if pulse is None else {"config": config}),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def batch(step: int, microbatch: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(2, WIDTH, generator=generator), torch.randn(2, 3, generator=generator)


def train(engine: Any, steps: range) -> list[float]:
    return [float(engine.train_batch(batch(step, m) for m in itertools.count()).detach()) for step in steps]


def plain_writes(folder: str) -> None:
    """Save after two steps; the losses of the next two lie beside."""
    from deepspeed import pipe

    engine = engine_of(pipe, partition_method="uniform")
    train(engine, range(BEFORE))
    engine.save_checkpoint(folder)
    losses = train(engine, range(BEFORE, BEFORE + AFTER))
    if engine.global_rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))
    assert "deepspeed_pulse" not in sys.modules
    print("PASSED", flush=True)


def plain_reads(folders: list[str]) -> None:
    """Go on from each folder with the same losses, whatever the weights were before."""
    from deepspeed import pipe

    for folder in folders:
        engine = engine_of(pipe, seed=7, partition_method="uniform")
        # upstream keeps optimizer state by rank and position, which a wave's ranks hold for other layers
        path, _ = engine.load_checkpoint(folder, load_optimizer_states=False)
        assert path is not None and engine.global_steps == BEFORE
        found = train(engine, range(BEFORE, BEFORE + AFTER))
        assert close(found, expected(folder)), (folder, found, expected(folder))
        engine.destroy()
    assert "deepspeed_pulse" not in sys.modules
    print("PASSED", flush=True)


def expected(folder: str) -> list[float]:
    return list(json.loads((Path(folder).parent / "plain" / "losses.json").read_text()))


def close(found: list[float], wanted: list[float]) -> bool:
    return all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(found, wanted, strict=True))


def pulse_reads_and_writes(folder: str) -> None:
    """Every way to run the layers goes on from the plain checkpoint, and writes files with the same tensors."""
    import deepspeed_pulse
    from deepspeed_pulse.errors import PlanError

    plain = Path(folder, "plain")
    for name, pulse in (("wave", {"placement": "wave"}), ("linear", {"placement": "linear"}), ("off", False)):
        block = {"solver_seconds": 0, **pulse} if pulse else False
        engine = engine_of(deepspeed_pulse, seed=7, pulse=block)
        try:
            engine.load_checkpoint(plain)
        except PlanError as problem:
            assert "written without deepspeed_pulse" in str(problem), problem
        else:
            raise AssertionError("nothing says which rank trained what")
        engine.load_checkpoint(plain, load_optimizer_states=False)
        assert engine.global_steps == BEFORE
        engine.save_checkpoint(Path(folder, name))
        found = train(engine, range(BEFORE, BEFORE + AFTER))
        assert close(found, expected(str(plain))), (name, found)
        if engine.global_rank == 0:
            same_files(plain / f"global_step{BEFORE}", Path(folder, name) / f"global_step{BEFORE}")
        engine.destroy()
    print("PASSED", flush=True)


def same_files(theirs: Path, ours: Path) -> None:
    """Every layer file of upstream's is there, with the same names and tensors."""
    files = sorted(path.name for path in theirs.glob("layer_*"))
    assert files, theirs
    for name in files:
        left, right = (torch.load(place / name, weights_only=True) for place in (theirs, ours))
        assert left.keys() == right.keys(), name
        assert all(torch.equal(left[key], right[key]) for key in left), name
