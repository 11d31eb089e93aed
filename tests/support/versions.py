"""What tests do otherwise where an older DeepSpeed cannot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def has_checkpoints() -> bool:
    """Whether upstream's checkpoint functions run on a CPU: before 0.19.8 they need an accelerator with streams."""
    return "transport_stream" not in _source("runtime/activation_checkpointing/checkpointing.py")


def plain_microbatches() -> int:
    """With how many microbatches upstream's plain pipeline trains right: before 0.19.3 every stage divides by them."""
    return 3 if "_backward_prologue_per_tensor" in _source("runtime/pipe/engine.py") else 1


def mend_upstream() -> None:
    """Let upstream's plain pipeline train right, to compare with, where an older one does not; in this process."""
    import torch
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if plain_microbatches() == 1:
        divided = PipelineEngine._backward_prologue_per_tensor
        PipelineEngine._backward_prologue_per_tensor = lambda engine, gradient: (
            divided(engine, gradient) if engine.is_last_stage() else gradient
        )
        PipelineEngine._take_model_step = torch.no_grad()(PipelineEngine._take_model_step)


def _source(path: str) -> str:
    """Of a module of DeepSpeed, which is not imported."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / path).read_text(encoding="utf-8")


def reentrant_checkpoint() -> Any:
    """Upstream's reentrant checkpoint function; torch's where upstream's does not run."""
    import deepspeed
    from torch.utils.checkpoint import checkpoint

    if has_checkpoints():
        return deepspeed.checkpointing.checkpoint
    return lambda function, *args: checkpoint(function, *args, use_reentrant=True)
