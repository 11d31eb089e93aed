"""Orders: never worse than the generators, proven where small, within memory."""

import itertools
import random
import time
from dataclasses import replace

import pytest
from toys import cluster, gpipe, layer, plan, profile, random_profile, uniform

from deepspeed_pulse.errors import InfeasibleError, PlanError
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import backward, forward
from deepspeed_pulse.planner import Job, SearchOptions, mip
from deepspeed_pulse.planner.mip import Mip
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.search.order_model import Solved, solve_order, whole_model
from deepspeed_pulse.planner.search.synthesize import synthesize
from deepspeed_pulse.planner.simulator import run


def row_orders(problem, rank, microbatches):
    """Every order of a rank: a microbatch's actions are a chain, and microbatches stay in order at each link of it."""
    stages = problem.plan.stages_of(rank)
    chain = [(forward, stage) for stage in stages] + [(backward, stage) for stage in reversed(stages)]

    def extend(done, row):
        if len(row) == len(chain) * microbatches:
            yield tuple(row)
        for m in range(microbatches):
            if done[m] < len(chain) and (m == 0 or done[m] < done[m - 1]):
                op, stage = chain[done[m]]
                yield from extend([*done[:m], done[m] + 1, *done[m + 1 :]], [*row, op(stage, m)])

    return list(extend([0] * microbatches, []))


def brute_force_makespan(problem, microbatches):
    best = float("inf")
    for schedule in itertools.product(*(row_orders(problem, r, microbatches) for r in range(problem.num_ranks))):
        try:
            best = min(best, run(problem, schedule).makespan_ms)
        except PlanError:  # this order deadlocks
            continue
    return best


@pytest.mark.parametrize("seed", range(3))
def test_exact_orders_equal_brute_force(seed):
    """Two ranks, one stage each and three microbatches, uneven times and slow messages."""
    rng = random.Random(seed)
    costs = profile([layer(rng.uniform(0.5, 2), rng.uniform(0.5, 4), output_bytes=1_000_000) for _ in range(2)])
    slow = cluster(Link(bandwidth_gb_per_s=rng.uniform(0.5, 5), latency_us=100))
    problem = Problem(plan(Placement.linear(2), 3), costs, slow)
    found = synthesize(problem.plan, Job.of(problem.plan, costs, slow), SearchOptions(solver_seconds=10))
    assert found.estimate.makespan_ms == pytest.approx(brute_force_makespan(problem, 3))


@pytest.mark.parametrize("seed", [25, 32])
def test_highs_finds_the_optimum_that_the_generators_miss(seed):
    """A V of three uneven ranks and two microbatches; all 14^3 orders are tried."""
    costs = random_profile(random.Random(seed), 6)
    blank = plan(Placement.wave(3), 2)
    greedy = synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=0))
    exact = synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=20))
    best = brute_force_makespan(Problem(blank, costs, cluster()), 2)
    assert greedy.estimate.makespan_ms > best * 1.001
    assert exact.estimate.makespan_ms == pytest.approx(best)
    assert (exact.solver.name, exact.solver.optimal) == ("highs", True)


@pytest.mark.parametrize("seed", range(6))
def test_solving_is_never_worse_and_repeats_itself(seed):
    costs = random_profile(random.Random(seed), 4, temb=True)
    blank = plan(Placement.wave(2), 3, of=costs)
    slow = cluster(Link(bandwidth_gb_per_s=1e-3, latency_us=10))
    greedy = synthesize(blank, Job.of(blank, costs, slow), SearchOptions(solver_seconds=0))
    exact = synthesize(blank, Job.of(blank, costs, slow), SearchOptions(solver_seconds=10, seed=1))
    assert exact.estimate.makespan_ms <= greedy.estimate.makespan_ms
    assert exact.estimate.makespan_ms >= exact.estimate.lower_bound_ms * (1 - 1e-9)
    again = synthesize(blank, Job.of(blank, costs, slow), SearchOptions(solver_seconds=10, seed=1))
    assert (again.schedule, again.solver) == (exact.schedule, exact.solver)


def test_a_solver_that_errs_is_not_believed(monkeypatch):
    """A worse order, or one that deadlocks, with a bound that claims to be proven: the generators' order stays."""
    costs = random_profile(random.Random(1), 6)
    blank = plan(Placement.wave(3), 2)
    greedy = synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=0))
    worse = gpipe(Problem(blank, costs, cluster()), 2)
    for schedule in (worse, tuple(row[::-1] for row in worse)):
        answer = Solved(schedule=schedule, bound_ms=0.0)
        monkeypatch.setattr(
            "deepspeed_pulse.planner.search.synthesize.solve_order", lambda *a, answer=answer, **k: answer
        )
        found = synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=1))
        assert (found.schedule, found.solver.name, found.solver.optimal) == (greedy.schedule, greedy.solver.name, False)


@pytest.mark.parametrize(("below", "optimal"), [(1e-7, True), (1e-5, False)])
def test_a_solver_proves_what_its_tolerance_allows(below, optimal, monkeypatch):
    costs, blank = random_profile(random.Random(25), 6), plan(Placement.wave(3), 2)
    job = Job.of(blank, costs, cluster())
    best = synthesize(blank, job, SearchOptions(solver_seconds=20))
    answer = Solved(schedule=best.schedule, bound_ms=best.estimate.makespan_ms * (1 - below))
    monkeypatch.setattr("deepspeed_pulse.planner.search.synthesize.solve_order", lambda *a, **k: answer)
    assert synthesize(blank, job, SearchOptions(solver_seconds=0.5)).solver.optimal is optimal


@pytest.mark.parametrize(("seed", "kinds"), [(0, []), (1, [True]), (3, [True])])
def test_only_what_may_win_is_searched_and_has_all_the_time(seed, kinds, monkeypatch):
    """Known orders in halves are shorter than any of whole backwards; of the first network none is shorter."""
    given = random_profile(random.Random(seed), 6)
    halves = [replace(x, weight_grad_ms=x.backward_ms / 2, input_grad_ms=x.backward_ms / 2) for x in given.layers]
    costs, blank = replace(given, layers=tuple(halves)), plan(Placement.wave(3), 4)
    searched = []

    def spy(pool, seed, deadline):
        searched.append(pool.split)
        assert deadline > begun + 1000

    monkeypatch.setattr("deepspeed_pulse.planner.search.synthesize._improve", spy)
    begun = time.process_time()
    synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=1000))
    assert searched == kinds


@pytest.mark.parametrize(("seconds", "begun"), [(0.0, False), (1e-3, True)])
def test_however_short_a_search_is_it_says_what_it_began_with(seconds, begun):
    blank = plan(Placement.wave(3), 2)
    job = Job.of(blank, random_profile(random.Random(25), 6), cluster())
    found = synthesize(blank, job, SearchOptions(solver_seconds=seconds))
    assert (found.solver.generator is not None) == begun


def test_uniform_stages_reach_the_bound_without_a_solver():
    found = synthesize(
        plan(Placement.wave(4), 8),
        Job.of(plan(Placement.wave(4), 8), uniform(8), cluster()),
        SearchOptions(solver_seconds=0),
    )
    assert (found.estimate.makespan_ms, found.solver.name, found.solver.optimal) == (pytest.approx(57), "wave", True)


def test_known_optimum_of_four_ranks_and_four_microbatches():
    """10P - 4 = 36 at M = P, above the bound of 33."""
    found = synthesize(
        plan(Placement.wave(4), 4),
        Job.of(plan(Placement.wave(4), 4), uniform(8), cluster()),
        SearchOptions(solver_seconds=0),
    )
    assert found.estimate.makespan_ms == pytest.approx(36)


@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_known_order_is_taken_of_those_that_fit(seed):
    """Without a search what is live is known of few orders; a search that has no time begins with the best of all."""
    costs = random_profile(random.Random(seed), 8, temb=True)
    blank = plan(Placement.wave(4), 6, of=costs)
    free = synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=0)).estimate
    for share in (1.0, 0.8, 0.6, 0.4):
        job = Job.of(blank, costs, cluster(), memory_bytes=int(share * max(free.peak_bytes)))
        answers = []
        for seconds in (0.0, 1e-9):
            try:
                found = synthesize(blank, job, SearchOptions(solver_seconds=seconds))
            except InfeasibleError as problem:
                answers.append(problem.needed_bytes)
            else:
                answers.append(found.solver.generator_step_ms or found.estimate.step_ms)
        assert answers[0] == pytest.approx(answers[1])


@pytest.mark.parametrize("limit", [4, 6, 8, 10, 12])
def test_less_memory_takes_longer_but_fits(limit):
    free = synthesize(
        plan(Placement.wave(4), 8),
        Job.of(plan(Placement.wave(4), 8), uniform(8), cluster()),
        SearchOptions(solver_seconds=0),
    )
    tight = synthesize(
        plan(Placement.wave(4), 8),
        Job.of(plan(Placement.wave(4), 8), uniform(8), cluster(), memory_bytes=limit),
        SearchOptions(solver_seconds=0),
    )
    assert max(tight.estimate.peak_bytes) <= limit
    assert tight.estimate.makespan_ms >= free.estimate.makespan_ms


def test_impossible_memory_says_what_would_be_needed():
    costs = uniform(4, param_bytes=10**8, activation_bytes=10**8)
    with pytest.raises(InfeasibleError) as caught:
        synthesize(
            plan(Placement.wave(2), 4), Job.of(plan(Placement.wave(2), 4), costs, cluster(), memory_bytes=9 * 10**8)
        )
    text = str(caught.value)
    assert "fits 0.900 GB a rank: the most frugal one needs 1.000 GB" in text
    assert "optimizer state are up to 0.800 GB" in text
    assert "smaller microbatch" in text


def test_rows_of_the_model_hold_for_a_simulated_order_which_the_solver_begins_with(monkeypatch):
    costs = random_profile(random.Random(2), 4, temb=True)
    blank = plan(Placement.wave(2), 2, of=costs)
    found = synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=0))
    problem = Problem(blank, costs, cluster())
    timeline = run(problem, found.schedule)
    for upper_ms in (timeline.makespan_ms, 2 * timeline.makespan_ms):
        model = whole_model(problem, upper_ms)
        start = {model.net.index[span.work]: span.start_ms for span in timeline.spans}
        value = {**start, "makespan": upper_ms, **{p: float(start[p[0]] < start[p[1]]) for p in model.pairs}}
        for terms, right in model.rows():
            assert sum(factor * value[variable] for variable, factor in terms) >= right - 1e-6
    assert model.pairs
    given = []
    monkeypatch.setattr(Mip, "start_from", lambda program, values: given.extend(values))
    model.program(start, seconds=1.0)
    assert given == [value[variable] for variable in (*model.nodes, *model.pairs, "makespan")]


@pytest.mark.timeout(120)
def test_the_solver_stops_by_processor_time(monkeypatch):
    """A busy machine gives a search as much of it as a quiet one; here all that it may take is over at once."""
    costs = random_profile(random.Random(3), 8)
    blank = plan(Placement.wave(4), 8, of=costs)
    found = synthesize(blank, Job.of(blank, costs, cluster()), SearchOptions(solver_seconds=0))
    problem = Problem(blank, costs, cluster())
    timeline = run(problem, found.schedule)
    taken = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(mip.time, "process_time", lambda: next(taken))
    known = {span.work: span.start_ms for span in timeline.spans}
    assert solve_order(problem, known, timeline.makespan_ms, seconds=500.0, seed=0) is not None
    assert next(taken) > 1000
