"""What a step holds at most on each rank: as planned, as counted, and as the stand-in's allocator says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from support.accelerator_ranks import begun
from support.small_transformers import small_uvit
from support.small_unet import unet_layers

from deepspeed_pulse.ir.communicators import communicator_bytes
from deepspeed_pulse.ir.schedule import Op

STEADY = 3
"""Steps before the one that is counted: optimizer state and shapes are there."""


def layers_of(model: str) -> list[Any]:
    """Stable Diffusion's 46 layers and 12 skips, or U-ViT's 12 blocks around the middle one and 6 skips.

    Of "wide" ones most memory is state, so that most is there in the optimizer's step.
    """
    from deepspeed_pulse.models import to_layers

    if model == "unet":
        return unet_layers()
    return to_layers(
        small_uvit(
            sample_size=size_of(model), hidden_size=512 if model == "wide" else 128, num_layers=12, num_classes=None
        )
    )


def size_of(model: str) -> int:
    return 8 if model == "wide" else 32


def batch_of(model: str, number: int, dtype: torch.dtype) -> Any:
    """Four latents, the same on every rank."""
    torch.manual_seed(number)
    shape = (4, 4, size_of(model), size_of(model))
    inputs = {"sample": torch.randn(shape, dtype=dtype), "timestep": torch.randint(1000, (4,))}
    text = {"encoder_hidden_states": torch.randn(4, 7, 32, dtype=dtype)} if model == "unet" else {}
    return {**inputs, **text}, torch.randn(shape, dtype=dtype)


def peaks(case: dict[str, Any]) -> None:
    """Prints, on each rank, a line PEAKS with a JSON object in bytes; communicators are no allocator's."""
    torch.set_num_threads(1)
    print("PEAKS", json.dumps({"case": case, **peak_of(case)}), flush=True)


def peak_of(case: dict[str, Any]) -> dict[str, Any]:
    from torch_npu import memory

    engine, data = engine_of(case)
    for _ in range(STEADY):
        engine.train_batch(data_iter=data)
    torch.npu.synchronize()
    memory.reset_peak()
    engine.train_batch(data_iter=data)
    torch.npu.synchronize()
    peak, stats, plan = memory.peak(), engine.pulse_stats(), engine.module.plan
    rank, cluster = engine.stage_id, engine.module.planned.cluster
    actions = peaks_of_actions(engine, data)
    engine.destroy()
    return {
        "rank": rank,
        "allocated": peak,
        "counted": stats["peak_live_bytes"] - stats["peak_parts"]["communicators"],
        "parts": stats["peak_parts"],
        "planned": plan.estimate.peak_bytes[rank] - communicator_bytes(plan, rank, cluster),
        "actions": actions,
    }


def peaks_of_actions(engine: Any, data: Iterator[Any]) -> list[tuple[str, int, int]]:
    """Of one more step, per action: what is counted at most while it runs, and what the allocator says.

    So what is counted of every kind of action is known, whichever of them is at the peak. Actions before the last first
    backward of a stage are left out: gradients, and ZeRO's bucket for them, come while that runs.
    """
    from torch_npu import memory

    runtime, found = engine._runtime, []
    run, waiting = runtime.run, set(engine.module.plan.stages_of(engine.stage_id))

    def counted(step: Any, *rest: Any) -> None:
        torch.npu.current_stream().synchronize()
        memory.reset_peak()
        runtime.stats.peak_live_bytes = 0
        run(step, *rest)
        torch.npu.current_stream().synchronize()
        stats, action = runtime.stats, step.action
        if not waiting:
            found.append((str(action), stats.peak_live_bytes - stats.peak_parts["communicators"], memory.peak()))
        elif action.op in (Op.BACKWARD, Op.WEIGHT_GRAD):
            waiting.discard(action.stage)

    runtime.run = counted
    engine.train_batch(data_iter=data)
    runtime.run = run
    return found


def engine_of(case: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
    model, bf16 = case["model"], case.get("bf16", False)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": case.get("zero", 0)},
        "zero_allow_untested_optimizer": True,
    }
    arguments = {
        "activation_checkpoint_interval": case.get("interval", 0),
        "example_batch": batch_of(model, 0, dtype),
    }
    engine = begun(case, layers_of(model), partial(torch.optim.AdamW, lr=1e-4), config, **arguments)
    return engine, (batch_of(model, number, dtype) for number in itertools.count())
