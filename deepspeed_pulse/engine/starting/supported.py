"""What ``deepspeed.initialize`` brings: the block that the module was planned with, and nothing that no plan runs."""

from __future__ import annotations

from typing import Any

from deepspeed_pulse.config import PulseConfig, parse_pulse
from deepspeed_pulse.engine.gradients.scaling import check_precision
from deepspeed_pulse.errors import ConfigError


def check_same_block(module: Any, config: Any) -> None:
    """The block that ``deepspeed.initialize`` brings must be the one the module was planned with."""

    def show(pulse: PulseConfig | None) -> str:
        return "none" if pulse is None else str(pulse.model_dump(exclude_defaults=True) or "defaults")

    brought = parse_pulse(config.get("pulse") if isinstance(config, dict) else None)
    if brought != module.pulse and not (module.job.config is None and brought is None):
        raise ConfigError(
            'deepspeed.initialize brings another "pulse" block than PipelineModule was planned with: expected '
            f"{show(module.pulse)}, found {show(brought)}; pass config= to PipelineModule, the same as to initialize"
        )


def check_zero_stage(stage: int) -> int:
    """Refuse ZeRO stages that cut gradients or weights; else the stage."""
    if stage >= 2:
        raise ConfigError(
            f"zero_optimization.stage: expected 0 or 1, found {stage}: ZeRO-2 and ZeRO-3 cut gradients and weights "
            "after every backward, while a pipeline accumulates gradients over its microbatches; use stage 1",
            more="unsupported",
        )
    return stage


def check_supported(config: Any, module: Any) -> None:
    """Refuse settings of upstream's parsed config that a plan would not follow."""
    check_zero_stage(int(config.zero_optimization_stage))
    if config.wall_clock_breakdown and config.steps_per_print is None:
        raise ConfigError(
            "wall_clock_breakdown: expected steps_per_print beside it, which says how often upstream prints the "
            "breakdown; found none"
        )
    check_precision(config)
    interval, planned = config.pipeline["activation_checkpoint_interval"], module.job.recomputing.interval
    if interval and interval != planned:
        raise ConfigError(
            f"pipeline.activation_checkpoint_interval: the module was planned with {planned}, "
            f"deepspeed.initialize brings {interval}; pass config= to PipelineModule, the same as to initialize"
        )
