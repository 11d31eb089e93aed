"""What a run does otherwise than its program, or upstream, would have it: said once at the start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed

from deepspeed_pulse.engine.replaced import clipping_is_replaced


def print_notes(engine: Any) -> None:
    """Print them; on global rank 0."""
    for line in _notes(engine):
        print(f"pulse: {line}", flush=True)


def _notes(engine: Any) -> Iterator[str]:
    module = engine.module
    recomputing = getattr(module.job, "recomputing", None)  # known once planned
    absent = None if recomputing is None else recomputing.note(module.layer_list)
    if absent is not None:
        yield absent
    full_precision = not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization())
    clips = engine.num_stages > 1 and engine.gradient_clipping() > 0 and full_precision
    if module.pulse is not None and clips and not clipping_is_replaced():
        yield (
            f"gradient_clipping {engine.gradient_clipping():g}: gradients are clipped by the norm over all pipeline "
            f"ranks; DeepSpeed {deepspeed.__version__} by itself would take, without fp16, bf16 and ZeRO, the norm of "
            "the first rank's parameters, so its losses differ where gradients are clipped"
        )
