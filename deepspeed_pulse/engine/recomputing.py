"""Upstream's arguments for activation checkpointing, as the plan and the runtime take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.runtime.activation_checkpointing import checkpointing as upstream

from deepspeed_pulse.engine.specs import type_name
from deepspeed_pulse.errors import ConfigError, did_you_mean
from deepspeed_pulse.runtime.recomputing import Checkpoint, non_reentrant


@dataclass(frozen=True, kw_only=True)
class Recomputing:
    """Which layers run again in backward, and how."""

    layers: str | tuple[int, ...] = "auto"
    """Indices, or "auto": the planner recomputes as few as the memory needs."""
    interval: int = 0
    """So many recomputed layers in a row keep one input; 0: the user gave none, so each keeps its own."""
    function: Checkpoint = non_reentrant
    absent: tuple[str, ...] = ()
    """Class names that were given, but no layer is of; as upstream, they mean nothing."""

    def note(self, layers: Sequence[Any]) -> str | None:
        """What is to be said of class names that no layer is of; None where there is none."""
        if not self.absent:
            return None
        names = sorted({type_name(layer) for layer in layers})
        hint = did_you_mean(self.absent[0], names)
        return (
            f"checkpointable_layers: no layer is a {' or a '.join(map(repr, self.absent))}{hint}, which is ignored, as "
            f"upstream does; layers are of types {', '.join(names)}"
        )


@dataclass(frozen=True, kw_only=True)
class RecomputeArguments:
    """What ``PipelineModule`` was given."""

    interval: Any = 0
    """So many recomputed layers in a row keep one input; 0: as the planner chooses."""
    function: Checkpoint | None = None
    """None for torch's non-reentrant checkpoint, unless the config says ``"use_reentrant": true``."""
    checkpointable: Sequence[str] | None = None
    """Class names of the layers that may be recomputed; None: all."""

    def resolve(self, layers: Sequence[Any], pipeline: Mapping[str, Any]) -> Recomputing:
        """What these and the config's ``pipeline`` block ask for; the block goes first. A ConfigError where wrong."""
        interval = pipeline.get("activation_checkpoint_interval") or self.interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
            raise ConfigError(f"activation_checkpoint_interval: expected a number of layers >= 0, found {interval!r}")
        reentrant = pipeline.get("use_reentrant")
        function = self.function or (upstream.checkpoint if reentrant else non_reentrant)
        if reentrant is False:
            function = non_reentrant
        return replace(self.every(interval, layers) if interval else Recomputing(), function=function)

    def every(self, interval: int, layers: Sequence[Any]) -> Recomputing:
        """Recompute so many layers in a row from one input; 0: none."""
        names = [type_name(layer) for layer in layers]
        chosen = range(len(names) if interval else 0)
        return Recomputing(
            layers=tuple(i for i in chosen if self.checkpointable is None or names[i] in self.checkpointable),
            interval=interval,
            absent=tuple(name for name in self.checkpointable or () if name not in names),
        )

    def of_upstream(self, *, relays: bool, planned: bool) -> Checkpoint:
        """What layers that run the upstream way are checkpointed with; ``planned`` ones do not run this way.

        Where layers stash or pop (``relays``), values travel in the tuple without a plan, and DeepSpeed's reentrant
        checkpoint is a ConfigError: it can be differentiated once, and upstream differentiates every tensor of the
        tuple by itself.
        """
        if not relays:
            return self.function or upstream.checkpoint
        if self.function is upstream.checkpoint and not planned:
            raise ConfigError(
                "activation_checkpoint_func: values relayed in the tuple are differentiated one by one, which "
                "deepspeed.checkpointing.checkpoint cannot be: expected another, such as deepspeed.checkpointing."
                "non_reentrant_checkpoint or torch's; leave it out, or turn pulse on"
            )
        return self.function or non_reentrant
