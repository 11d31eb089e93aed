"""What ranks run in the tests of loading and saving diffusers models."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from support.parity import mse, share_groups
from support.small_models import small_sd_unet
from support.small_unet import unet_batch

TRAINED_STEPS = 2


def make_engine(layers: list[Any], ranks: int, microbatches: int = 2, **config: Any) -> Any:
    """An engine over ``ranks`` pipeline ranks for a layer list of the small SD U-Net."""
    import deepspeed

    from deepspeed_pulse import PipelineModule

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pulse": {"solver_seconds": 0, "placement": "wave"},
        **config,
    }
    module = PipelineModule(layers=layers, num_stages=ranks, loss_fn=mse, config=config, input="sample")
    trainable = [p for p in module.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
    optimizer = torch.optim.AdamW(trainable) if "bf16" in config else sgd  # ZeRO knows Adam
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine


def batches(engine: Any, step: int, dtype: torch.dtype = torch.float32) -> Any:
    for microbatch in itertools.count():
        inputs, labels = unet_batch(step, microbatch, engine.grid.data_parallel_id)
        cast = {name: v.to(dtype) if v.is_floating_point() else v for name, v in inputs.items()}
        yield cast, labels.to(dtype)


def saves(folder: str) -> None:
    """Trained on 4 ranks in each precision and saved; what is in the files is what the ranks hold."""
    from deepspeed_pulse.models import save_pretrained, to_layers

    share_groups()
    zero1 = {"zero_optimization": {"stage": 1}}
    for name, ranks, config in (
        ("fp32", 4, {}),
        ("bf16", 2, {"bf16": {"enabled": True}, **zero1}),
        ("bf16 alone", 4, {"bf16": {"enabled": True}}),
    ):
        torch.manual_seed(0)
        engine = make_engine(to_layers(small_sd_unet()), ranks, **config)
        dtype = torch.bfloat16 if "bf16" in config else torch.float32
        for step in range(TRAINED_STEPS):
            engine.train_batch(batches(engine, step, dtype))
        save_pretrained(engine, f"{folder}/{name}", max_shard_size="1MB")
        check_files(engine, Path(folder, name), dtype)
        if dtype != torch.float32:
            save_pretrained(engine, f"{folder}/{name} masters", dtype=torch.float32)
            check_files(engine, Path(folder, f"{name} masters"), torch.float32, rounds_to=dtype)
        engine.destroy()
    print("PASSED", flush=True)


def check_files(engine: Any, folder: Path, dtype: torch.dtype, rounds_to: torch.dtype | None = None) -> None:
    """Every rank finds its own weights in the folder, complete when the call returns."""
    from safetensors.torch import load_file

    written: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        written.update(load_file(path))
    inexact = 0
    for _, layer in engine.module.local_layers():
        for key, weight in layer.state_dict().items():
            assert written[key].dtype == dtype, (folder, key)
            assert torch.equal(written[key].to(rounds_to or dtype), weight), (folder, key)
            inexact += int(not torch.equal(written[key], weight.to(dtype)))
    assert bool(inexact) == (rounds_to is not None), (folder, inexact)
