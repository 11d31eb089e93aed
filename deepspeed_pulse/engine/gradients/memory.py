"""What DeepSpeed's optimizers hold: always, and while they sum gradients and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_pulse.runtime.state import full_bucket, state_bytes, step_bytes


def is_fused(config: Mapping[str, Any] | None) -> bool:
    """The config names an optimizer of DeepSpeed's that makes no tensors of its own in a step."""
    section = (config or {}).get("optimizer")
    if not isinstance(section, Mapping):
        return False
    options = section.get("params")
    is_torchs = isinstance(options, Mapping) and options.get("torch_adam")
    return str(section.get("type")).lower() in ("adam", "adamw", "lion") and not is_torchs


def held_always(engine: Any) -> int:
    """Bytes of weights, gradients and optimizer state of this rank's layers."""
    return state_bytes(engine.module.parameters(), **_sharing(engine))


def held_in_bucket(engine: Any) -> int:
    """Of these, ZeRO's bucket."""
    elements = _sharing(engine).get("bucket_elements")
    return 0 if elements is None else full_bucket([p for p in engine.module.parameters() if p.requires_grad], elements)


def held_in_step(engine: Any) -> int:
    """Bytes that sums of gradients and the optimizer's next step make and drop; of the groups that it has now."""
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    if not isinstance(basic, torch.optim.Optimizer):
        return 0
    zero = isinstance(optimizer, DeepSpeedZeroOptimizer)
    held = [p for group in optimizer.bit16_groups for p in group] if zero else ()
    copies = engine.bfloat16_enabled() or engine.fp16_enabled()
    if isinstance(optimizer, BF16_Optimizer) and optimizer.grad_acc_dtype is torch.float32:
        copies = False
    return step_bytes(held, basic, copies=copies, **_sharing(engine))


def _sharing(engine: Any) -> dict[str, int]:
    """How replicas share what the optimizer holds, as ``runtime.state`` wants it."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return {"shards": engine.dp_world_size, "bucket_elements": int(engine.optimizer.reduce_bucket_size)}
    return {"shards": engine.dp_world_size if isinstance(engine.optimizer, BF16_Optimizer) else 1}
