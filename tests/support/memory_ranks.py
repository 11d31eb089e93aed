"""What a step holds at most on each rank: as planned, as counted, and as the stand-in's allocator says."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.parity import mse, share_groups
from support.small_models import small_sd_unet

STEADY = 3
"""Steps before the one that is counted: optimizer state and shapes are there."""


def unet() -> tuple[list[Any], Callable[[], Any]]:
    """Stable Diffusion's 46 layers and 12 skips, on 32 x 32 latents, four at a time."""
    from deepspeed_pulse.models import to_layers

    torch.manual_seed(0)
    model = small_sd_unet(sample_size=32)

    def batch() -> Any:
        latents = torch.randn(4, 4, 32, 32)
        inputs = {"timestep": torch.randint(1000, (4,)), "encoder_hidden_states": torch.randn(4, 7, 32)}
        return {"sample": latents, **inputs}, torch.randn(4, 4, 32, 32)

    return to_layers(model), batch


def uvit() -> tuple[list[Any], Callable[[], Any]]:
    """U-ViT, 12 blocks around the middle one, 6 skips."""
    from deepspeed_pulse.models import to_layers
    from deepspeed_pulse.models.transformers.uvit import UViTModel

    torch.manual_seed(0)
    model = UViTModel(sample_size=32, hidden_size=128, num_layers=12, num_attention_heads=4)

    def batch() -> Any:
        inputs = {"sample": torch.randn(4, 4, 32, 32), "timestep": torch.randint(1000, (4,))}
        return inputs, torch.randn(4, 4, 32, 32)

    return to_layers(model), batch


MODELS = {"unet": unet, "uvit": uvit}


def peaks(cases: list[dict[str, Any]]) -> None:
    """Prints, for each case and rank, a line PEAKS with a JSON object in bytes."""
    torch.set_num_threads(1)
    share_groups()
    for case in cases:
        found = peak_of(case)
        print("PEAKS", json.dumps({"case": case, **found}), flush=True)


def peak_of(case: dict[str, Any]) -> dict[str, Any]:
    from torch_npu import memory

    gc.collect()
    torch.npu.synchronize()
    before = memory.allocated()
    engine, data = engine_of(case)
    for _ in range(STEADY):
        engine.train_batch(data_iter=data)
    torch.npu.synchronize()
    memory.reset_peak()
    engine.train_batch(data_iter=data)
    torch.npu.synchronize()
    peak, stats, plan = memory.peak() - before, engine.pulse_stats(), engine.module.plan
    rank = engine.stage_id
    engine.destroy()
    return {
        "rank": rank,
        "allocated": peak,
        "counted": stats["peak_live_bytes"],
        "parts": stats["peak_parts"],
        "planned": plan.estimate.peak_bytes[rank],
    }


def engine_of(case: dict[str, Any]) -> tuple[Any, Iterator[Any]]:
    import deepspeed

    from deepspeed_pulse import PipelineModule

    layers, batch = MODELS[case["model"]]()
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case["M"],
        "gradient_clipping": case.get("clip", 0.0),
        "steps_per_print": 10**9,
        "bf16": {"enabled": case.get("bf16", False)},
        "zero_optimization": {"stage": case.get("zero", 0), "reduce_bucket_size": 1_000_000},
        "zero_allow_untested_optimizer": True,
        "pulse": {"solver_seconds": 0, "placement": case.get("placement", "wave"), "waves": case.get("waves", 1)},
    }
    example = cast(batch(), dtype)
    module = PipelineModule(
        layers=layers,
        num_stages=case["P"],
        loss_fn=mse,
        seed_layers=True,
        activation_checkpoint_interval=case.get("interval", 0),
        config=config,
        example_batch=example,
    )
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    return engine, (cast(seeded(number, batch), dtype) for number in itertools.count())


def seeded(number: int, batch: Callable[[], Any]) -> Any:
    """The same on every rank."""
    torch.manual_seed(number)
    return batch()


def cast(batch: Any, dtype: torch.dtype) -> Any:
    inputs, labels = batch
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}, labels.to(dtype)
