"""How a job holds and sums what it trains: what of it a plan's times and memory depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_pulse.ir.fields import Fields


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules of a training job.

    Attributes:
        zero_stage: 1: data-parallel peers share the optimizer state, and weights are gathered at the end of a step.
        reduce_early: a stage's gradients are summed from its last backward on, not all after the rank's last action.
    """

    zero_stage: int = 0
    reduce_early: bool = True

    @classmethod
    def of(cls, zero_stage: int) -> Rules:
        """Gradients are summed early, unless DeepSpeed's ZeRO optimizer holds them: what the engine does by itself."""
        return cls(zero_stage=zero_stage, reduce_early=zero_stage == 0)

    @property
    def shards_optimizer(self) -> bool:
        return self.zero_stage > 0

    def shards(self, data_parallel: int) -> int:
        """Parts that the optimizer state is cut into."""
        return data_parallel if self.shards_optimizer else 1

    def to_dict(self) -> dict[str, Any]:
        return {"zero_stage": self.zero_stage, "reduce_early": self.reduce_early}

    @classmethod
    def read(cls, fields: Fields) -> Rules:
        fields.done(cls.__dataclass_fields__)
        zero_stage = fields.integer("zero_stage")
        if zero_stage > 1:
            raise fields.error("zero_stage", "0 or 1")
        return cls(zero_stage=zero_stage, reduce_early=fields.flag("reduce_early", default=zero_stage == 0))


PLAIN = Rules()
"""Nothing is shared."""
