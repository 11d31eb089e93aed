"""Halves of backwards that cost more apart than whole are put together where the step gets no longer."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from toys import cluster, random_profile, uniform

from deepspeed_pulse.ir.schedule import Op
from deepspeed_pulse.planner import Job, SearchOptions, check, make_plan


def costly(costs, times):
    """Both halves of a backward take so many times what it takes whole."""
    halves = [(times * x.backward_ms / 2, times * x.backward_ms / 2) for x in costs.layers]
    layers = [replace(x, input_grad_ms=i, weight_grad_ms=w) for x, (i, w) in zip(costs.layers, halves, strict=True)]
    return replace(costs, layers=tuple(layers))


def planned(costs, ranks, microbatches, seconds):
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=ranks, microbatches=microbatches)
    plan = make_plan(job, SearchOptions(placement="wave", solver_seconds=seconds))
    check(plan, num_layers=costs.num_layers, values=costs.values)
    return plan, Counter(action.op for row in plan.schedule for action in row)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 6)])
def test_most_halves_that_cost_something_are_put_together(ranks, microbatches):
    costs = costly(uniform(2 * ranks), 1.15)
    (quick, before), (found, after) = (planned(costs, ranks, microbatches, seconds) for seconds in (0, 5))
    assert found.estimate.step_ms < quick.estimate.step_ms
    assert 0 < after[Op.WEIGHT_GRAD] < before[Op.WEIGHT_GRAD]


def test_halves_that_cost_nothing_stay_as_the_search_left_them():
    costs = costly(uniform(8), 1.0)
    (quick, before), (found, after) = (planned(costs, 4, 8, seconds) for seconds in (0, 5))
    assert (found.estimate, after) == (quick.estimate, before)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_gets_no_longer(seed):
    costs = costly(random_profile(random.Random(seed), 9), 1.1 + seed / 20)
    (quick, _), (found, _) = (planned(costs, 2, 5, seconds) for seconds in (0, 3))
    assert found.estimate.step_ms <= quick.estimate.step_ms
