"""Where halves of a backward take longer than a whole one, a search chooses between them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import assert_sound, problems
from toys import cluster, costly, plan, random_profile, rows, uniform

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import Action, Op
from deepspeed_pulse.planner import Job, SearchOptions, check, make_plan
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.halves import joined
from deepspeed_pulse.planner.schedules.heuristics import count_cap
from deepspeed_pulse.planner.schedules.listing import list_schedule
from deepspeed_pulse.planner.schedules.unroll import unrolled
from deepspeed_pulse.planner.search.net import Net
from deepspeed_pulse.planner.search.paths import Move, Paths
from deepspeed_pulse.planner.search.tabu import Search
from deepspeed_pulse.planner.search.windows import reordered, windows
from deepspeed_pulse.planner.simulator import run


def with_costly_halves(problem):
    return Problem(problem.plan, costly(problem.profile, 1.2), problem.cluster)


def planned(costs, ranks, microbatches, seconds):
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=ranks, microbatches=microbatches)
    plan = make_plan(job, SearchOptions(placement="wave", solver_seconds=seconds))
    check(plan, num_layers=costs.num_layers, values=costs.values)
    return plan, Counter(action.op for row in plan.schedule for action in row)


@pytest.mark.parametrize(("ranks", "microbatches", "best"), [(2, 4, 25.6), (4, 6, 40.2)])
def test_a_search_takes_some_backwards_whole_and_some_in_halves(ranks, microbatches, best):
    """Putting halves together after a search of halves alone ends at 25.6 and 40.8."""
    costs = costly(uniform(2 * ranks), 1.15)
    (quick, _), (found, ops) = (planned(costs, ranks, microbatches, seconds) for seconds in (0, 2))
    assert found.estimate.step_ms <= best * (1 + 1e-9) < quick.estimate.step_ms
    assert ops[Op.BACKWARD] and ops[Op.WEIGHT_GRAD]


def test_halves_that_cost_nothing_stay_as_the_search_left_them():
    costs = costly(uniform(8), 1.0)
    (quick, before), (found, after) = (planned(costs, 4, 8, seconds) for seconds in (0, 5))
    assert (found.estimate, after) == (quick.estimate, before)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_gets_no_longer(seed):
    costs = costly(random_profile(random.Random(seed), 9), 1.1 + seed / 20)
    (quick, _), (found, _) = (planned(costs, 2, 5, seconds) for seconds in (0, 3))
    assert found.estimate.step_ms <= quick.estimate.step_ms


def test_backwards_of_a_stage_stay_in_order_where_some_are_whole_already():
    """Nobody waits for the first stage's gradients: its halves are put together where ``W`` stands."""
    costs = costly(uniform(1), 1.2)
    problem = Problem(plan(Placement.linear(1), 3, of=costs), costs, cluster())
    mixed = rows("0F0 0F1 0I0 0B1 0F2 0I2 0W0 0W2")
    assert joined(problem, mixed) == rows("0F0 0F1 0B0 0F2 0B1 0B2")


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_paths_stay_the_simulators_as_halves_come_and_go(problem, rng):
    """Any exchange, and any insert within a row, also ones that deadlock, which change nothing."""
    problem, microbatches = with_costly_halves(problem), problem.plan.microbatches
    net = Net(problem, microbatches, split=True)
    search = Search(net, None, net.rows(list_schedule(problem, microbatches, split=True)), seed=0, target_ms=0.0)
    paths = search.paths
    for _ in range(20):
        stage = rng.randrange(problem.num_stages)
        rank, whole = problem.placement[stage], Action(stage, Op.BACKWARD, rng.randrange(microbatches))
        if rng.random() < 0.5:
            paths.exchange(search._exchange(rank, whole))
        else:
            paths.move(Move(rank, *(rng.randrange(len(paths.rows[rank])) for _ in range(2))))
        anew = Paths(net, paths.rows)
        assert (paths.end, paths.reach) == (pytest.approx(anew.end), pytest.approx(anew.reach))
    assert paths.span == pytest.approx(run(problem, net.schedule(paths.rows)).makespan_ms)


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 4))
def test_a_search_with_both_keeps_the_cap_and_knows_its_makespan(problem, room):
    problem, microbatches = with_costly_halves(problem), problem.plan.microbatches
    held = max(len(problem.plan.stages_of(rank)) for rank in range(problem.num_ranks))
    cap = count_cap(problem, held + room)
    net = Net(problem, microbatches, split=True)
    start = list_schedule(problem, microbatches, cap=cap, split=True)
    search = Search(net, cap, net.rows(start), seed=room, target_ms=0.0)
    search.run(60, float("inf"))
    found = net.schedule(search.best_rows)
    figures = assert_sound(problem, found)
    assert figures.makespan_ms == pytest.approx(search.best_ms)
    assert figures.makespan_ms <= run(problem, start).makespan_ms * (1 + 1e-9)
    change = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.WEIGHT_GRAD: -1}
    assert all(max(accumulate(change.get(a.op, 0) for a in row)) <= held + room for row in found)


@settings(max_examples=15, deadline=None)
@given(problems(max_ranks=3, max_microbatches=4))
def test_windows_of_an_order_of_both_leave_it_sound(problem):
    problem, microbatches = with_costly_halves(problem), problem.plan.microbatches
    net = Net(problem, microbatches, split=True)
    assume(not net.queues)
    search = Search(net, None, net.rows(list_schedule(problem, microbatches, split=True)), seed=0, target_ms=0.0)
    search.run(30, float("inf"))
    for window in windows(Paths(net, search.best_rows)):
        found = reordered(net, search.best_rows, window, search.change, search.limits, seconds=60)
        if found is not None:
            assert assert_sound(problem, net.schedule(found)).makespan_ms < search.best_ms


@pytest.mark.parametrize(
    "few",
    [
        "0F0 0B0 0F1 0I1 0W1 0F2 0B2 0F3 0I3 0W3 0F4 0B4 0F5 0I5 0W5",
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0B1 0F5 0B2 0B3 0B4 0B5",  # one of each op in a row is no period
    ],
)
def test_an_order_of_both_that_is_unrolled_has_each_backward_once(few):
    (row,) = order = rows(few)
    found = unrolled(order, {action: float(at) for at, action in enumerate(row)}, 11)
    assert found
    for (longer,) in found:
        ops = [{a.op for a in longer if a.microbatch == m} for m in range(11)]
        assert len(longer) == sum(map(len, ops))
        assert all(one in ({Op.FORWARD, Op.BACKWARD}, {Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD}) for one in ops)
