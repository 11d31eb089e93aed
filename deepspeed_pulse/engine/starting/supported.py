"""What ``deepspeed.initialize`` brings: the block that the module was planned with, and nothing that no plan runs."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.config import PulseConfig, parse_pulse
from deepspeed_pulse.engine.collectives import raise_everywhere
from deepspeed_pulse.engine.device import runs_at_once
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
    if getattr(config.zero_config, "zenflow", None) is not None:
        raise ConfigError(
            "zero_optimization.zenflow: expected none, found one: it steps some weights between the backwards of a "
            "whole model, which no rank of a pipeline runs; leave it out (offload_optimizer works without it)",
            more="unsupported",
        )
    if config.wall_clock_breakdown and config.steps_per_print is None:
        profiles = config.flops_profiler_config.enabled
        key = "flops_profiler.enabled" if profiles else "wall_clock_breakdown"
        more = "; of a pipeline it prints no profile, so leave it out" if profiles else ""
        raise ConfigError(
            f"{key}: expected steps_per_print beside it, which says how often upstream prints the breakdown of a step; "
            f"found none{more}"
        )
    check_precision(config)
    _check_parallel(config)
    if config.comms_config.comms_logger_enabled and config.comms_config.comms_logger.enabled:
        check_logger(torch.device(get_accelerator().device_name()), module.num_stages)
    interval, planned = config.pipeline["activation_checkpoint_interval"], module.job.recomputing.interval
    if interval and interval != planned:
        raise ConfigError(
            f"pipeline.activation_checkpoint_interval: the module was planned with {planned}, "
            f"deepspeed.initialize brings {interval}; pass config= to PipelineModule, the same as to initialize"
        )


def check_data(config: Any, training_data: Any) -> None:
    """Refuse data of which no checkpoint could be saved: DeepSpeed looks for a curriculum's sampler, hidden by then."""
    sampling = config.data_efficiency_config.get("data_sampling", {})
    if training_data is not None and sampling.get("curriculum_learning", {}).get("enabled"):
        raise ConfigError(
            "data_efficiency.data_sampling.curriculum_learning.enabled beside training_data=: expected false, found "
            "true: DeepSpeed's pipelines do not find its sampler again when they save; order the data in a loader of "
            "your own, and give its batches to train_batch",
            more="unsupported",
        )


def check_kept(engine: Any) -> None:
    """Refuse ways of saving of which no run could go on, or not under another plan.

    With storage of each host's own the first process of a host writes the state of its stage, and those of other
    stages there write none; layers are written by replicas in turn, each on its own host.
    """
    if getattr(engine.optimizer, "elastic_checkpoint", False):
        raise ConfigError(
            "zero_optimization.elastic_checkpoint: expected false, found true: it leaves learning rates and other "
            "options out, so that no other plan goes on with its state; leave it out, and any number of ranks and "
            "replicas does",
            more="unsupported",
        )
    if not engine.use_node_local_storage():
        return
    problem = None
    if engine.module.num_stages > 1 or engine.local_rank != engine.global_rank:
        problem = ConfigError(
            "checkpoint.use_node_local_storage: expected false, found true: a host would hold some of a checkpoint's "
            "files only, from which no run can go on; leave it out, and save into a folder that all machines share",
            more="unsupported",
        )
    raise_everywhere(problem, "checkpoint")


def _check_parallel(config: Any) -> None:
    """Layers cut once more, and samples cut short, are nobody's plan."""
    sizes = {
        "tensor_parallel.autotp_size": config.tensor_parallel_config.autotp_size,
        "sequence_parallel_size": config._param_dict.get("sequence_parallel_size"),
    }
    for key, size in sizes.items():
        if size not in (None, 0, 1):
            raise ConfigError(
                f"{key}: expected none, found {size}: ranks are stages of a pipeline and its replicas; leave it out",
                more="unsupported",
            )
    routing = config.data_efficiency_config.get("data_routing", {})
    if routing.get("enabled") and routing.get("random_ltd", {}).get("enabled"):
        raise ConfigError(
            "data_efficiency.data_routing.random_ltd.enabled: expected false, found true: it counts tokens in a "
            "forward of the whole model, which no rank of a pipeline runs; leave it out",
            more="unsupported",
        )


def check_logger(device: torch.device, num_stages: int) -> None:
    """The logger ends the device's work after every message that it sees begin, whose other end may come later."""
    if num_stages > 1 and not runs_at_once(device):
        raise ConfigError(
            "comms_logger.enabled: expected false, found true: DeepSpeed's logger waits for every message as soon as "
            "it is asked for, and ranks of a plan ask for messages before they are sent; pulse_stats() and a monitor "
            "tell the bytes that ranks send"
        )
