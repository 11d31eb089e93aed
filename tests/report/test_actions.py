"""torch.distributed.pipelining reads the table and finds the same actions."""

from __future__ import annotations

import contextlib
import csv
import io
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.planner import Job, SearchOptions
from deepspeed_pulse.planner.cost import default_cluster
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import generators_for
from deepspeed_pulse.planner.search.synthesize import synthesize
from deepspeed_pulse.report.files import to_csv


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


def _accepted(plan: Plan) -> None:
    """Torch reads the table, validates it, adds sends and receives, and runs them in its own dry run to the end."""
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _simulate_comms_compute
    from torch.distributed.pipelining.schedules import _validate_schedule as validate

    placement, ranks, stages = plan.placement, plan.pipeline_ranks, plan.num_stages
    table = csv.reader(io.StringIO(to_csv(plan)))
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(table)}
    validate(actions, ranks, stages, plan.microbatches)
    sent = _add_send_recv(actions, stage_to_rank=lambda stage: placement[stage], num_stages=stages)
    done = _simulate_comms_compute(sent, stage_to_rank=lambda stage: placement[stage], num_stages=stages)
    ran = {rank: [str(a) for a in row if a is not None] for rank, row in done.items()}
    assert all(set(map(str, row)) <= set(ran[rank]) for rank, row in enumerate(plan.schedule))


@pytest.mark.parametrize(
    "placement", [Placement.wave(4), Placement.wave(2, 2), Placement.linear(4), Placement.loop(3, 2)]
)
@pytest.mark.parametrize("split", [False, True])
def test_torch_accepts_every_generator(placement: tuple[int, ...], split: bool) -> None:
    for microbatches in (1, 5, 8):
        problem = _problem(placement, microbatches)
        for generator in generators_for("auto", placement, split=split).values():
            for order in generator.orders(problem, (None,), split):
                with contextlib.suppress(InfeasibleError):
                    _accepted(replace(problem.plan, schedule=order()))


@pytest.mark.parametrize("split", [False, True])
def test_torch_accepts_what_is_synthesised(split: bool) -> None:
    problem = _problem(Placement.wave(4), 8)
    found = synthesize(
        problem.plan,
        Job.of(problem.plan, problem.profile, problem.cluster, memory_bytes=6000),
        SearchOptions(split_backward=split, solver_seconds=0.5),
    )
    _accepted(found)


def _problem(placement: tuple[int, ...], microbatches: int) -> Problem:
    layers = [
        LayerCost(name="layer", forward_ms=1.0, backward_ms=2.0, param_bytes=0, activation_bytes=1000, output_bytes=0)
        for _ in placement
    ]
    costs = Profile(name="toy", device="none", dtype="float32", microbatch_size=1, layers=tuple(layers), skips=())
    ranks = max(placement) + 1
    plan = Plan(
        pipeline_ranks=ranks,
        data_parallel=1,
        microbatches=microbatches,
        microbatch_size=1,
        boundaries=tuple(range(len(placement) + 1)),
        placement=placement,
        schedule=((),) * ranks,
    )
    return Problem(plan, costs, default_cluster(ranks, 10**12))
