"""How a job holds and sums what it trains: what of it a plan's times and memory depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from deepspeed_pulse.ir.codec import Form
from deepspeed_pulse.ir.fields import Fields


def _read_early(fields: Fields, name: str) -> bool:
    return fields.flag(name) if fields.has(name, null=True) else fields.raw("zero_stage") == 0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules of a training job.

    Attributes:
        zero_stage: 1: data-parallel peers share the optimizer state, and weights are gathered at the end of a step.
        reduce_early: a stage's gradients are summed while its last backward runs, not all after the rank's last action.
        fused_optimizer: its step makes no tensors of its own, as torch's Adam does by default.
    """

    zero_stage: Annotated[int, Form(required=True)] = 0
    reduce_early: Annotated[
        bool, Form(required=True, read=_read_early, schema={"type": "boolean", "default": True})
    ] = True

    fused_optimizer: Annotated[bool, Form(left_out=True)] = False

    @classmethod
    def of(cls, zero_stage: int, *, fused_optimizer: bool = False) -> Rules:
        """Gradients are summed early, unless DeepSpeed's ZeRO optimizer holds them: what the engine does by itself."""
        return cls(zero_stage=zero_stage, reduce_early=zero_stage == 0, fused_optimizer=fused_optimizer)

    @property
    def shards_optimizer(self) -> bool:
        return self.zero_stage > 0

    def check_form(self, fields: Fields) -> None:
        if self.zero_stage > 1:
            raise fields.error("zero_stage", "0 or 1")


PLAIN = Rules()
"""Nothing is shared."""
