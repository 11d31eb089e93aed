"""Switches that a user may have set on a diffusers model before it becomes layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from deepspeed_pulse.models.units import refuse, told


def check_switches(model: nn.Module) -> None:
    """Refuse what is for sampling only, and say so when a switch has no effect on layers.

    Raises :class:`GraphError` naming every such switch; warns of gradient checkpointing and
    of compiling the whole model.
    """
    refuse(model, _for_sampling(model))
    if getattr(model, "is_gradient_checkpointing", False):
        warnings.warn(
            f"{type(model).__name__}.enable_gradient_checkpointing() works on whole blocks, which a layer list takes "
            "apart: most of it is bypassed. Call model.disable_gradient_checkpointing() and let the pipeline recompute "
            "layers instead (activation_checkpoint_interval, or the plan)",
            stacklevel=3,
        )
    if model._compiled_call_impl is not None:
        warnings.warn(
            f"{type(model).__name__}.compile() is bypassed: layers call the model's parts; compile those instead, for "
            "example its blocks",
            stacklevel=3,
        )


def _for_sampling(model: Any) -> Iterator[str]:
    """One line per kind of switch, with the first module that has it on."""
    found: dict[str, list[str]] = {
        "runs in chunks; call model.disable_forward_chunking() (it is for sampling)": [],
        "runs in slices; call model.set_default_attn_processor() (slicing is for sampling)": [],
        "has fused projections; call model.unfuse_qkv_projections() (they are for sampling)": [],
    }
    chunks, slices, fused = found.values()
    for path, module in model.named_modules():
        processor = type(getattr(module, "processor", None)).__name__
        if getattr(module, "_chunk_size", None) is not None:
            chunks.append(path)
        if processor.startswith("Sliced"):
            slices.append(path)
        # Attention without unfuse_projections keeps its flag when only the processors are put back.
        if processor.startswith("Fused") or (
            getattr(module, "fused_projections", False) and hasattr(module, "unfuse_projections")
        ):
            fused.append(path)
    if getattr(model, "is_cache_enabled", False):
        yield "a cache of block outputs is on; call model.disable_cache() (it is for sampling)"
    yield from told(found)
