"""fp16: what is refused, loss scaling where upstream's backward leaves it out, and where it stands in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from deepspeed_pulse.errors import ConfigError

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")
"""Of upstream's dynamic scalers; the last is kept under ZeRO only."""

UNSCALED = (
    "train_batch inside torch.autocast of float16: the loss is not scaled, so small gradients become zeros, and a "
    'GradScaler has no place, as train_batch makes the step too; use torch.bfloat16, or the "fp16" block, which scales'
)


def check_precision(config: Any) -> None:
    """Raise a ConfigError for settings of upstream's that layers run by a plan would not see."""
    if config.torch_autocast_enabled:
        raise ConfigError(
            "torch_autocast.enabled: expected false under pulse, whose layers run outside upstream's autocast; use "
            "bf16 or fp16, or call train_batch inside torch.autocast of bfloat16"
        )
    if not config.float16_config.enabled:
        return
    if config.float16_config.auto_cast:
        raise ConfigError("fp16.auto_cast: expected false under pulse, which takes batches as they are; yield float16")
    if not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"fp16.enabled: expected a device with fp16, found {get_accelerator().device_name()!r}, where DeepSpeed "
            "refuses it; use bf16 or fp32"
        )


def is_unscaled(engine: Any) -> bool:
    """True where a script's autocast computes in float16 now and nothing scales the loss."""
    kind = torch.device(engine.device).type
    in_half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
    return in_half and not engine.fp16_enabled()


def trained_dtype(config: Any) -> torch.dtype | None:
    """What upstream casts the module to; None where it stays as it is."""
    if config.bfloat16_config.enabled:
        return torch.bfloat16
    return torch.float16 if config.float16_config.enabled else None


def scaled(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """The loss as the optimizer expects its gradients."""
    if isinstance(optimizer, ZeROOptimizer):
        return optimizer.scale_if_loss(loss)  # type: ignore[no-any-return]
    return scaled_without_zero(loss, optimizer)


def scaled_without_zero(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """Upstream divides gradients by the scale of these optimizers, and multiplies the loss by it under ZeRO only."""
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)) and optimizer.loss_scale is not None:
        loss = loss.float() * optimizer.loss_scale
    return loss


def keep_scale(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Where dynamic scaling stood, out of a scaler's fields; nothing of a static scale, which is the config's."""
    if not fields.get("dynamic", fields.get("dynamic_loss_scale", False)):
        return {}
    return {name: fields[name] for name in FIELDS if name in fields}


def set_scale(optimizer: Any, scale: Mapping[str, Any]) -> None:
    """Let an optimizer's dynamic scaling go on from there."""
    # up to 0.18.5 an optimizer without ZeRO is its own scaler
    scaler = getattr(optimizer, "loss_scale_config", getattr(optimizer, "loss_scaler", optimizer))
    if getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)):
        for name, value in scale.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
