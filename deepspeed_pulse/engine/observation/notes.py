"""What a run does otherwise than its program, or upstream, would have it: said once at the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.device import MOST_QUEUES, QUEUES
from deepspeed_pulse.engine.gradients.whole_model import own_rates
from deepspeed_pulse.engine.observation.environment import local_ranks
from deepspeed_pulse.engine.plans.planning import Planned, with_neighbours_ms
from deepspeed_pulse.engine.replaced import clipping_is_replaced
from deepspeed_pulse.ir.communicators import communicator_bytes, communicators
from deepspeed_pulse.ir.units import gigabytes

Asked = Callable[[Any], bool]
"""Whether a setting of the config, None where it is absent, asks for what it does not get."""

_UNHEARD: dict[str, tuple[Asked, str]] = {
    "flops_profiler.enabled": (
        bool,
        "DeepSpeed profiles a forward of the whole model, which no rank of a pipeline runs, so no profile is printed; "
        "ds_pulse report says where a step's time goes",
    ),
    "autotuning.enabled": (
        bool,
        "a pipeline gives DeepSpeed's tuner no figures; ds_pulse tune chooses ranks, microbatches and waves",
    ),
    "hybrid_engine.enabled": (bool, "DeepSpeed makes no hybrid engine of a pipeline"),
    "activation_checkpointing": (
        bool,
        "read by deepspeed.checkpointing.configure() only, for its own checkpoint function; what a pipeline recomputes "
        "is said by pipeline.activation_checkpoint_interval",
    ),
    "checkpoint.parallel_write.pipeline_stage": (
        lambda found: found is False,
        "replicas share the writing all the same",
    ),
    "checkpoint.tag_validation": (
        lambda found: isinstance(found, str) and found.lower() != "fail",
        "tags that differ between ranks are an error in any case",
    ),
}


def print_notes(engine: Any) -> None:
    """Print them; on global rank 0."""
    for line in _notes(engine):
        print(f"pulse: {line}", flush=True)


def _communicators(planned: Planned) -> Iterator[tuple[int, int]]:
    """Per rank how many, and what they hold."""
    plan, cluster = planned.plan, planned.cluster
    for rank in range(plan.pipeline_ranks):
        yield communicators(plan, rank, cluster=cluster).count, communicator_bytes(plan, rank, cluster)


def unheard(config: Mapping[str, Any]) -> Iterator[str]:
    """What is said of settings of DeepSpeed's that do nothing in a pipeline, or less than one may trust."""
    for path, (asks, what) in _UNHEARD.items():
        found: Any = config
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if asks(found):
            yield f"{path}: {what}"


def crowded(device: str, threads: int, local_ranks: int, cores: int) -> str | None:
    """What is said where ranks of one machine compute on its cores, each with threads for more than its share."""
    share = max(1, cores // local_ranks)
    if device != "cpu" or local_ranks < 2 or threads <= share:
        return None
    return (
        f"{local_ranks} ranks of {threads} threads each share {cores} cores and hold each other up: "
        f"export OMP_NUM_THREADS={share} before the start"
    )


def too_few_queues(backend: str, communicators: int) -> str | None:
    """Said on NCCL where a rank has more streams than its device has queues: they hold each other up."""
    needed, queues = communicators + 2, os.environ.get(QUEUES, "8")  # the rank's own, and one for sums
    if backend != "nccl":
        return None
    if needed > MOST_QUEUES:
        return (
            f"up to {needed} streams a rank, and torch has {MOST_QUEUES} a device: messages that share one may wait "
            'for each other for ever; take "placement": "wave", where skips send nothing, or fewer pipeline ranks'
        )
    if not queues.isdigit() or int(queues) >= needed:
        return None
    return (
        f"up to {needed} streams a rank and {queues} queues of the device ({QUEUES}): messages of streams that share "
        f"one may wait for each other for ever; export {QUEUES}={MOST_QUEUES} before the start"
    )


def _notes(engine: Any) -> Iterator[str]:
    slow = crowded(get_accelerator().device_name(), torch.get_num_threads(), local_ranks(), os.cpu_count() or 1)
    if slow is not None:
        yield slow
    yield from unheard(engine._config._param_dict)
    yield from own_rates(engine)
    module = engine.module
    recomputing = getattr(module.job, "recomputing", None)  # known once planned
    absent = None if recomputing is None else recomputing.note(module.layer_list)
    if absent is not None:
        yield absent
    planned = getattr(module, "planned", None)
    held = [] if planned is None else [*_communicators(planned)]
    if any(num_bytes for _, num_bytes in held):
        count, num_bytes = max(held, key=lambda one: one[1])
        yield (
            f"up to {count} communicators a rank, which hold {gigabytes(num_bytes)} GB of its memory: HCCL_BUFFSIZE, "
            '"hccl_buffer_size" and P2P_HCCL_BUFFSIZE say how much each'
        )
    crossed = too_few_queues(str(torch.distributed.get_backend()), max((count for count, _ in held), default=0))
    if crossed is not None:
        yield crossed
    faster_ms = None if planned is None else with_neighbours_ms(planned)
    if planned is not None and faster_ms is not None:
        plan = planned.plan
        yield (
            "hosts hold replicas, and pipelines reach over hosts: a step is planned as "
            f"{plan.estimate.step_ms:.1f} ms, and as {faster_ms:.1f} ms where a host holds whole pipelines, or "
            'neighbours of one: pass PipelineModule(topology=ProcessTopology(axes=["data", "pipe"], '
            f"dims=[{plan.data_parallel}, {plan.pipeline_ranks}])) in place of num_stages="
        )
    by_default = "gradient_clipping" not in (module.job.config or {})
    if module.pulse is not None and by_default and engine.gradient_clipping() > 0:
        clipped = f"gradients are clipped at {engine.gradient_clipping():g}, DeepSpeed's default"
        yield f'{clipped}: "gradient_clipping" sets it'
    full_precision = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
    clips = engine.num_stages > 1 and engine.gradient_clipping() > 0 and full_precision
    if module.pulse is not None and clips and not clipping_is_replaced():
        yield (
            f"gradient_clipping {engine.gradient_clipping():g}: gradients are clipped by the norm over all pipeline "
            f"ranks; DeepSpeed {deepspeed.__version__} by itself would take, without fp16, bf16 and ZeRO, the norm of "
            "the first rank's parameters, so its losses differ where gradients are clipped"
        )
