"""What saving and loading a checkpoint costs with digests of its files, without them, and with DeepSpeed's own code.

python benchmarks/checkpoints/run.py --write     # about 2 minutes on 2 quiet cores
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import readme
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from ranks import launch

from deepspeed_pulse import PipelineModule
from deepspeed_pulse.engine.checkpoints import digests, files, saving
from deepspeed_pulse.engine.common import CommonEngine

README = Path(__file__).with_name("README.md")
MARK = "<!-- tables: everything below is written by run.py -->"
LAYERS, WIDTH, ROUNDS = 16, 2048, 5


class NoDigest:
    """In place of SHA-256."""

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64


@contextmanager
def without_digests() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(digests.hashlib, "sha256", NoDigest))
        for module in (digests, saving):
            stack.enter_context(patch.object(module, "digest_of", lambda path: "0" * 64))
        yield


@contextmanager
def with_digests() -> Iterator[None]:
    yield


@contextmanager
def deepspeeds_own() -> Iterator[None]:
    """Upstream's writer and its methods, where this package's stand before them."""
    names = ("_save_checkpoint", "_save_zero_checkpoint", "_copy_recovery_script", "load_module_state_dict")
    with ExitStack() as stack:
        for name in ("save_checkpoint", "load_checkpoint", *names):
            stack.enter_context(patch.object(CommonEngine, name, getattr(PipelineEngine, name)))
        for name in ("save", "load"):
            stack.enter_context(patch.object(files.SafeCheckpointEngine, name, getattr(TorchCheckpointEngine, name)))
        yield


SIDES: dict[str, Callable[[], Any]] = {
    "with digests": with_digests,
    "without digests": without_digests,
    "DeepSpeed": deepspeeds_own,
}


def measure(folder: str) -> dict[str, list[float]]:
    """Seconds of a save and a load of each side."""
    trained = make()
    best = {side: [float("inf"), float("inf")] for side in SIDES}
    for number in range(ROUNDS):
        for side, act in SIDES.items():
            place = Path(folder) / f"{side} {number}"
            with act():
                times = [timed(lambda place=place: trained.save_checkpoint(str(place), "step"))]
                times.append(timed(lambda place=place: trained.load_checkpoint(str(place), "step")))
            best[side] = [min(pair) for pair in zip(best[side], times, strict=True)]
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(place)
    return best


def make() -> Any:
    deepspeed.init_distributed(verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0},
    }
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, config=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    made, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    made.train_batch(iter([(torch.randn(1, WIDTH), torch.randn(1, WIDTH))] * 2))
    return made


def timed(act: Callable[[], Any]) -> float:
    torch.distributed.barrier()
    start = time.perf_counter()
    act()
    torch.distributed.barrier()
    return time.perf_counter() - start


def table(best: dict[str, list[float]]) -> str:
    rows = [f"| {side} | {save:.2f} | {load:.2f} |" for side, (save, load) in best.items()]
    return "\n".join(["| 512 MB, 2 ranks | save, s | load, s |", "|---|---|---|", *rows])


def main() -> None:
    options = readme.keep_option(argparse.ArgumentParser(description=__doc__))
    with tempfile.TemporaryDirectory() as folder:
        found = table(launch(measure, 2, folder))
    print(found)
    if options.write:
        readme.write(README, found, MARK)


if __name__ == "__main__":
    main()
