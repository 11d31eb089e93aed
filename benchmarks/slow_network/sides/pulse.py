"""This project's engine with a plan: the wave, linear placement with direct sends, or what the tuner chose."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from measured import measured_profiles
from resting import Resting
from slow_network.cases import Case

from deepspeed_pulse import LayerSpec, PipelineModule
from deepspeed_pulse.engine.plans.machines import machines
from deepspeed_pulse.ir.plan import Plan

Described = Callable[[], dict[str, Any]]


def layer_list(case: Case) -> list[Any]:
    """A tuple is a class with its arguments and names; all else is a layer as it is."""
    return [
        LayerSpec(entry[0], *entry[1], stash=entry[2], pop=entry[3]) if isinstance(entry, tuple) else entry
        for entry in case.named()
    ]


def measured(case: Case) -> dict[str, Any]:
    """Layer costs on this machine, as a profile; asked on all ranks at once."""
    (profile,) = measured_profiles(case.name, layer_list(case), case.named_batch()[0], [1])
    return profile.to_dict()


def unlimited() -> dict[str, Any]:
    """What a message between two ranks takes here; asked on all ranks at once."""
    return machines(torch.device("cpu")).to_dict()


def build(case: Case, *, plan: str, samples: int, zero: int) -> tuple[Callable[[], None], Described]:
    """``plan``: its JSON. ``samples``: of a microbatch. ``zero``: ZeRO stage."""
    made = Plan.from_json(plan)
    path = Path(tempfile.gettempdir()) / f"slow_network_plan_{os.getpid()}.json"
    path.write_text(plan)
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": made.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "pulse": {"plan": str(path)},
    }
    model = PipelineModule(
        layers=layer_list(case), num_stages=made.pipeline_ranks, loss_fn=torch.nn.functional.mse_loss, config=config
    )
    path.unlink()
    optimizer = Resting(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = itertools.repeat(case.named_batch(samples))

    def step() -> None:
        engine.train_batch(data)

    def describe() -> dict[str, Any]:
        """Of the last step: bytes by kind, the peak of what this rank counts, what its engine measured."""
        stats = engine.pulse_stats()
        return {"p2p_bytes": stats["p2p_bytes"], "peak_live_bytes": stats["peak_live_bytes"]}

    return step, describe
