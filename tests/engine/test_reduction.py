"""Gradients are summed over replicas stage by stage, with the same result as at the end of the step."""

from __future__ import annotations

import pytest
import torch
from support.launch import launch

from deepspeed_pulse.engine.gradients.buckets import buckets
from deepspeed_pulse.engine.schedule import PulseSchedule
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import lower
from deepspeed_pulse.ir.schedule import Action

ORDER = {0: "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", 1: "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"}
MARKED = {
    0: "0F0 0F1 3F0 3B0 3F1 expect3 3B1 reduce3 0B0 expect0 0B1 reduce0",
    1: "1F0 2F0 1F1 2F1 2B0 1B0 expect2 2B1 reduce2 expect1 1B1 reduce1",
}


@pytest.mark.timeout(400)
def test_early_reduction_is_the_reduction_at_the_end() -> None:
    """Two replicas: not a bit differs; four: as the unpartitioned model. Then all that falls back."""
    four = {"model": "toy", "P": 1, "M": 3, "clip": 0.1, "enabled": True}
    for _, output in launch("support.reduction_ranks:reduces", 4, [four], timeout=380):
        assert "PASSED" in output


MIB = 2**20
FULL = [
    (16, [1] * 64, [16, 16, 16, 8, 4, 2, 1, 1]),
    (16, [0.5] * 12, [3, 1.5, 1, 0.5]),
    (16, [0.25] * 3, [0.5, 0.25]),
    (16, [0.125] * 3, [0.375]),
    (16, [20, 1, 1, 20, 3, 3], [20, 20, 5, 3]),
    (16, [12, 12, 12], [24, 12]),
    (16, [], []),
    (2, [1] * 8, [2, 2, 2, 1, 1]),
    (2, [0.125] * 6, [0.375, 0.25, 0.125]),
    (0.25, [0.5] * 3, [0.5, 0.5, 0.5]),
]
"""MiB of full buckets, of weights, in the order in which their gradients come, and of the buckets."""


@pytest.mark.parametrize(("full", "sizes", "expected"), FULL)
def test_the_last_buckets_are_small_as_nothing_runs_beside_their_sums(
    full: float, sizes: list[float], expected: list[float]
) -> None:
    weights = [torch.nn.Parameter(torch.empty(int(size * MIB / 4), device="meta")) for size in sizes]
    found = list(buckets(weights, int(full * MIB)))
    assert [sum(weight.numel() * 4 for weight in bucket) / MIB for bucket in found] == expected
    small = [id(weight) for weight, size in zip(weights, sizes, strict=True) if size < full]
    gathered = [id(weight) for bucket in found for weight in bucket if weight.numel() * 4 < full * MIB]
    assert gathered == small, "in order"


@pytest.mark.parametrize("rank", ORDER)
def test_a_stage_is_reduced_after_its_last_backward(rank: int) -> None:
    assert instructions(rank, reduce_early=True) == MARKED[rank]
    assert instructions(rank, reduce_early=False) == ORDER[rank]


def instructions(rank: int, *, reduce_early: bool) -> str:
    """A rank's row as its instructions say it; what follows the last action is the same for all."""
    plan = Plan(
        pipeline_ranks=2,
        data_parallel=2,
        microbatches=2,
        microbatch_size=1,
        boundaries=(0, 1, 2, 3, 4),
        placement=Placement.wave(2),
        schedule=tuple(tuple(map(Action.parse, ORDER[r].split())) for r in (0, 1)),
        routes=(),
    )
    schedule = PulseSchedule(
        lower(plan)[rank], training=True, reduce_early=reduce_early, micro_batches=2, stages=2, stage_id=rank
    )
    found = []
    for instruction in (i for step in schedule.steps() for i in step):
        if instruction.name == "RunStep":
            found.append(str(instruction.step.action))
        elif instruction.name in ("ExpectStageGrads", "ReduceStageGrads"):
            found.append(f"{instruction.name[:6].lower()}{instruction.stage}")
    return " ".join(found)
