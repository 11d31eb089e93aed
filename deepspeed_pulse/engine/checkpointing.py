"""Upstream's arguments for activation checkpointing, as the plan and the runtime take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing as upstream

from deepspeed_pulse.engine.plans.costs import type_name
from deepspeed_pulse.errors import ConfigError, did_you_mean
from deepspeed_pulse.runtime.replay import Checkpoint, non_reentrant


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Which layers run again in backward, and how.

    Attributes:
        layers: indices, or "auto": the planner recomputes as few as the memory needs.
        interval: so many recomputed layers in a row keep one input; 0: the user gave none, so each keeps its own.
        function: runs what is recomputed.
    """

    layers: str | tuple[int, ...] = "auto"
    interval: int = 0
    function: Checkpoint = non_reentrant


def resolve(
    layers: Sequence[Any],
    interval: Any,
    function: Checkpoint | None,
    checkpointable: Sequence[str] | None,
    pipeline: Mapping[str, Any],
) -> Checkpointing:
    """What the arguments of ``PipelineModule`` and the config's ``pipeline`` block ask for; the block goes first.

    Args:
        layers: the layer list.
        function: None for torch's non-reentrant checkpoint, unless the block says ``"use_reentrant": true``.
        checkpointable: class names of the layers that may be recomputed; None: all.
    """
    interval = pipeline.get("activation_checkpoint_interval") or interval
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
        raise ConfigError(f"activation_checkpoint_interval: expected a number of layers >= 0, found {interval!r}")
    reentrant = pipeline.get("use_reentrant")
    if function is None and reentrant:
        function = upstream.checkpoint
    if function is None or reentrant is False:
        function = non_reentrant
    if not interval:
        return Checkpointing(function=function)
    names = [type_name(layer) for layer in layers]
    unknown = [name for name in checkpointable or () if name not in names]
    if unknown:
        raise ConfigError(
            f"checkpointable_layers: no layer is a {unknown[0]!r}{did_you_mean(unknown[0], names)}; layers are of "
            f"types {', '.join(sorted(set(names)))}"
        )
    chosen = tuple(i for i, name in enumerate(names) if checkpointable is None or name in checkpointable)
    return Checkpointing(layers=chosen, interval=interval, function=function)
