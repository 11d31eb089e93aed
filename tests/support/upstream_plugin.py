"""A plugin for DeepSpeed's own tests: they find one of our modules where DeepSpeed's ``PipelineModule`` stands.

    UPSTREAM_MODULE=wave python -m pytest -p support.upstream_plugin tests/unit/runtime/pipe

Their ranks are processes that import the tests anew; a test brings this module with it, which is imported first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import multiprocessing
import os
import signal
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

MODULE = os.environ.get("UPSTREAM_MODULE", "theirs")
"""``theirs``: nothing is replaced; ``ours``: our module without a plan; ``line``: the plan comes with
``deepspeed.initialize``; ``wave``: the module is made with one."""


def die_with_the_parent() -> None:
    """Whatever happens to that: nobody else ends a rank that hangs."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


die_with_the_parent()  # pytest, and the process that ranks are forked from


def block() -> dict[str, Any]:
    return {"placement": "wave" if MODULE == "wave" else "linear", "solver_seconds": 0, "timeout_seconds": 300}


@functools.cache
def replace() -> None:
    """In this process."""
    if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):  # tests of before 0.19.8 compare them
        DeepSpeedEngine.sparse_tensor_module_names = frozenset()
    if MODULE == "theirs":
        return
    from deepspeed_pulse import PipelineModule

    class Planned(PipelineModule):
        """Made with a plan. The batch of its config is another than the tests', the interval theirs."""

        def __init__(self, *args: Any, **given: Any) -> None:
            batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
            config = {**batch, "pipeline": {"activation_checkpoint_interval": 1}, "pulse": block()}
            super().__init__(*args, config=config, **given)

    for place in (deepspeed.pipe, deepspeed.runtime.pipe.module):
        place.PipelineModule = Planned if MODULE == "wave" else PipelineModule
    if MODULE != "ours":
        deepspeed.initialize = bringing_a_block(deepspeed.initialize)


def bringing_a_block(genuine: Any) -> Any:
    """A ``deepspeed.initialize`` whose config has a block where the module is ours."""
    import deepspeed_pulse

    @functools.wraps(genuine)
    def initialize(*args: Any, **given: Any) -> Any:
        module = given.get("model")
        if isinstance(module, deepspeed_pulse.PipelineModule):
            given["config"] = {**given["config"], "pulse": block()}
        return genuine(*args, **given)

    return initialize


class Images(torch.utils.data.Dataset[Any]):
    """In place of torchvision's made-up ones: this many, of 3 x 32 x 32 numbers, in ten classes."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % 10


def made(module: str, name: str) -> Any:
    """A test of theirs in a rank's process, after the replacement."""
    die_with_the_parent()
    replace()
    found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if "unit.alexnet_model" in sys.modules:
        sys.modules["unit.alexnet_model"].cifar_trainset = lambda fp16=False: Images()
    return found.__new__(found)


def reduced(test: Any) -> Any:
    """How a test goes to a rank's process."""
    return made, (type(test).__module__, type(test).__qualname__), vars(test)


def pytest_configure() -> None:
    replace()
    multiprocessing.set_forkserver_preload([__name__])


def pytest_collection_finish() -> None:
    from unit.common import DistributedExec

    DistributedExec.__reduce__ = reduced
