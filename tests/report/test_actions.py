"""torch.distributed.pipelining reads the table and finds the same actions."""

from __future__ import annotations

import csv
import io
from typing import Any

from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.report.actions import to_csv


def test_torch_reads_the_table(sample: Any) -> None:
    from torch.distributed.pipelining.schedules import _Action

    rows = [[_Action.from_str(cell) for cell in row] for row in csv.reader(io.StringIO(to_csv(sample.plan)))]
    assert [[Action.parse(str(action)) for action in row] for row in rows] == [list(r) for r in sample.plan.schedule]


def test_torch_validates_the_order(sample: Any) -> None:
    """Every stage does all its microbatches, forward before backward, each on one rank."""
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    rows = csv.reader(io.StringIO(to_csv(sample.plan)))
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    found = _validate_schedule(actions, 4, 8, 8)
    assert [found[stage] for stage in range(8)] == list(sample.plan.placement)
