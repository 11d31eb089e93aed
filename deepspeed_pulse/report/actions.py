"""The schedule as the table that torch.distributed.pipelining reads: a row a rank, cells like ``2F0``."""

from __future__ import annotations

from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import format_schedule


def to_csv(plan: Plan) -> str:
    """Compute actions only (torch's ``compute_only``), in order; torch derives the messages itself."""
    return "".join(",".join(row) + "\n" for row in format_schedule(plan.schedule))
