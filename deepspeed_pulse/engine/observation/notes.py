"""What a run does otherwise than its program, or upstream, would have it: said once at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed

from deepspeed_pulse.engine.plans.planning import Planned
from deepspeed_pulse.engine.replaced import clipping_is_replaced
from deepspeed_pulse.ir.communicators import communicator_bytes, communicators
from deepspeed_pulse.ir.units import gigabytes


def print_notes(engine: Any) -> None:
    """Print them; on global rank 0."""
    for line in _notes(engine):
        print(f"pulse: {line}", flush=True)


def _communicators(planned: Planned) -> Iterator[tuple[int, int]]:
    """Per rank how many, and what they hold."""
    plan, cluster = planned.plan, planned.cluster
    for rank in range(plan.pipeline_ranks):
        yield communicators(plan, rank, cluster=cluster).count, communicator_bytes(plan, rank, cluster)


def _notes(engine: Any) -> Iterator[str]:
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
    full_precision = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
    clips = engine.num_stages > 1 and engine.gradient_clipping() > 0 and full_precision
    if module.pulse is not None and clips and not clipping_is_replaced():
        yield (
            f"gradient_clipping {engine.gradient_clipping():g}: gradients are clipped by the norm over all pipeline "
            f"ranks; DeepSpeed {deepspeed.__version__} by itself would take, without fp16, bf16 and ZeRO, the norm of "
            "the first rank's parameters, so its losses differ where gradients are clipped"
        )
