"""Local search: longest paths kept right from move to move, stashes within their limits, orders that unroll."""

import itertools
import random
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import assert_sound, problems
from toys import cluster, costly, layer, plan, profile, uniform

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import Op
from deepspeed_pulse.planner import Job, SearchOptions
from deepspeed_pulse.planner.bounds import lower_bound_ms, preemptive_ms
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import byte_cap, count_cap
from deepspeed_pulse.planner.schedules.listing import list_schedule
from deepspeed_pulse.planner.schedules.templates import dualpipev
from deepspeed_pulse.planner.schedules.unroll import unrolled
from deepspeed_pulse.planner.search import improve
from deepspeed_pulse.planner.search.improve import Improver
from deepspeed_pulse.planner.search.net import Net
from deepspeed_pulse.planner.search.paths import Move, Paths
from deepspeed_pulse.planner.search.synthesize import synthesize
from deepspeed_pulse.planner.search.tabu import Search
from deepspeed_pulse.planner.search.windows import reordered, stash_rows, window_model, windows
from deepspeed_pulse.planner.simulator import rank_state_bytes, run


def uneven(ranks, seed):
    rng = random.Random(seed)
    return profile([layer(f, 2 * f, activation_bytes=1000) for f in (rng.uniform(0.6, 1.4) for _ in range(2 * ranks))])


@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans(), st.randoms(use_true_random=False))
def test_paths_stay_the_simulators_from_move_to_move(problem, split, rng):
    """Any insert within a row, also ones that deadlock, which change nothing."""
    net = Net(problem, problem.plan.microbatches, split=split)
    paths = Paths(net, net.rows(list_schedule(problem, problem.plan.microbatches, split=split)))
    for _ in range(20):
        rank = rng.randrange(problem.num_ranks)
        source, target = (rng.randrange(len(paths.rows[rank])) for _ in range(2))
        paths.move(Move(rank, source, target))
        anew = Paths(net, paths.rows)
        assert paths.end == pytest.approx(anew.end)
        assert paths.reach == pytest.approx(anew.reach)
    assert paths.span == pytest.approx(run(problem, net.schedule(paths.rows)).makespan_ms)


@settings(max_examples=30, deadline=None)
@given(problems(), st.booleans(), st.integers(0, 4))
def test_a_search_keeps_the_cap_and_is_never_worse(problem, split, room):
    held = max(len(problem.plan.stages_of(rank)) for rank in range(problem.num_ranks))
    cap = count_cap(problem, held + room)
    net = Net(problem, problem.plan.microbatches, split=split)
    start = list_schedule(problem, problem.plan.microbatches, cap=cap, split=split)
    search = Search(net, cap, net.rows(start), seed=room, target_ms=0.0)
    search.run(60, time.process_time() + 60)
    found = net.schedule(search.best_rows)
    figures = assert_sound(problem, found)
    assert figures.makespan_ms == pytest.approx(search.best_ms)
    assert figures.makespan_ms <= run(problem, start).makespan_ms * (1 + 1e-9)
    release = net.ops[-1]
    for row in found:
        changes = [1 if a.op.value == "F" else -1 if a.op is release else 0 for a in row]
        assert max(itertools.accumulate(changes)) <= held + room


def fewest_bytes(problem):
    """Of the fullest rank: state and one microbatch of each of its stages, and a tenth for what arrives early."""
    weights = byte_cap(problem, ()).weights
    single = [sum(weights[s] for s in problem.plan.stages_of(r)) for r in range(problem.num_ranks)]
    return int(1.1 * max(rank_state_bytes(problem, r) + one for r, one in enumerate(single)))


@settings(max_examples=40, deadline=None)
@given(
    problems(max_ranks=3, max_microbatches=5),
    st.booleans(),
    st.sampled_from([1.0, 1.2]),
    st.sampled_from([None, 0.0, 0.3, 0.7, 1.0]),
)
def test_synthesised_plans_are_sound_within_memory_and_never_worse(problem, split, halves, room):
    """Caps from little more than one microbatch in flight to what the best order without a cap takes."""
    problem = Problem(problem.plan, costly(problem.profile, halves), problem.cluster)

    def made(seconds, memory=None):
        found = synthesize(
            problem.plan,
            Job.of(problem.plan, problem.profile, problem.cluster, memory_bytes=memory),
            SearchOptions(split_backward=split, solver_seconds=seconds),
        )
        assert_sound(problem, found.schedule)
        assert memory is None or max(found.estimate.peak_bytes) <= memory
        return found.estimate

    limit = None
    if room is not None:
        least, most = fewest_bytes(problem), max(made(0).peak_bytes)
        limit = int(least + room * max(0, most - least))
    try:
        greedy = made(0, limit)
    except InfeasibleError:
        assert room < 1
        return
    found = made(0.1, limit)
    assert found.step_ms <= greedy.step_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_uneven_stages_are_solved_to_the_bound(seed):
    found = synthesize(
        plan(Placement.wave(4), 8),
        Job.of(plan(Placement.wave(4), 8), uneven(4, seed), cluster()),
        SearchOptions(solver_seconds=60),
    )
    assert found.estimate.gap < 1e-9
    assert found.solver.optimal


@pytest.mark.parametrize(("cap", "best"), [(6, 63), (8, 60)])
def test_known_optima_under_a_cap(cap, best):
    """P=4, M=8; the search stops at the known optimum here, where no bound tells it to."""
    problem = Problem(plan(Placement.wave(4), 8), uniform(8), cluster())
    net, limit = Net(problem, 8), count_cap(problem, cap)
    search = Search(net, limit, net.rows(list_schedule(problem, 8, cap=count_cap(problem, 4))), seed=0, target_ms=best)
    search.run(2000, time.process_time() + 60)
    assert search.best_ms == best


@pytest.mark.parametrize(
    ("ranks", "microbatches", "limit", "split"),
    [
        (2, 3, 3000, False),
        (4, 8, 7000, False),
        pytest.param(4, 8, 6000, True, marks=pytest.mark.soak),
        pytest.param(2, 16, 3000, False, marks=pytest.mark.soak),
        (8, 16, None, False),
    ],
)
def test_the_same_seed_gives_the_same_plan(ranks, microbatches, limit, split, monkeypatch):
    """Also where no bound ends the search: short rounds and small windows let it end by itself, HiGHS included."""
    monkeypatch.setattr(improve, "_NODES_A_ROUND", 4_000)
    monkeypatch.setattr("deepspeed_pulse.planner.search.windows.MAX_PAIRS", 40)
    reached = []
    monkeypatch.setattr(improve, "reordered", lambda *a, **k: (reached.append(k["seconds"]), reordered(*a, **k))[1])
    texts = [
        synthesize(
            plan(Placement.wave(ranks), microbatches),
            Job.of(plan(Placement.wave(ranks), microbatches), uneven(ranks, 1), cluster(), memory_bytes=limit),
            SearchOptions(split_backward=split, solver_seconds=1000, seed=7),
        )
        for _ in range(2)
    ]
    assert texts[0].to_json() == texts[1].to_json()
    assert texts[0].solver.name == "search"
    assert (limit is None) == texts[0].solver.optimal
    assert bool(reached) is (limit is not None)
    assert min(reached, default=900) > 300, "no time limit was near"


@pytest.mark.parametrize("capped", [False, True])
def test_a_search_whose_orders_never_fit_ends_by_itself(capped, monkeypatch):
    """Also where the stash is not what is too much, so that less of it changes nothing."""
    monkeypatch.setattr(improve, "_NODES_A_ROUND", 1_000)
    problem = Problem(plan(Placement.wave(2), 6), uneven(2, 1), cluster())
    cap = count_cap(problem, 8) if capped else None
    start = list_schedule(problem, 6, cap=count_cap(problem, 2))
    refused = []
    improver = Improver(
        problem=problem,
        split=False,
        cap=cap,
        target_ms=0.0,
        seed=0,
        deadline=float("inf"),
        keep=lambda order: bool(refused.append(order)),
    )
    improver.improve([start])
    assert refused
    assert improver.best_ms == float("inf")


@pytest.mark.parametrize(
    ("better", "rounds"),
    [
        ([], 16 + 16 + 16 + 12),  # of a start each, of eight two, of four four: then nothing was found for 32
        ([2, 9], 18 + 16 + 16 + 12),  # of the second start, and of its next one that is better than that
        ([15], 17 + 16 + 16 + 16 + 12),  # for 4 x 15 rounds the best one stands
    ],
)
def test_short_searches_end_when_the_best_order_stands(better, rounds, monkeypatch):
    """Rounds in which an order that is better than all before is found, and how many there are."""
    problem = Problem(plan(Placement.wave(2), 6), uneven(2, 1), cluster())
    done = []

    def run(search, steps, deadline):
        done.append(steps)
        if len(done) in better:
            search.best_ms = 10.0 - len(done) / 10
        return len(done) in better

    monkeypatch.setattr(Search, "run", run)
    monkeypatch.setattr(improve, "windows", lambda paths: [])
    improver = Improver(
        problem=problem, split=False, cap=None, target_ms=0.0, seed=0, deadline=float("inf"), keep=lambda order: True
    )
    improver.improve([list_schedule(problem, 6)] * 20)
    assert len(done) == rounds
    assert set(done) == {len(improver.net.duration)}, "as many steps as nodes"


def test_a_search_leaves_where_it_stands_also_when_rounds_are_short():
    """It goes on from its best order after so many steps without a better one, over rounds."""
    problem = Problem(plan(Placement.wave(2), 6), uneven(2, 1), cluster())
    net = Net(problem, 6)
    one, many = (Search(net, None, net.rows(list_schedule(problem, 6)), seed=3, target_ms=0.0) for _ in range(2))
    one.run(3000, float("inf"))
    for _ in range(30):
        many.run(100, float("inf"))
    assert (one.best_ms, one.rows) == (many.best_ms, many.rows)


def test_a_move_forbids_what_would_undo_it():
    problem = Problem(plan(Placement.wave(2), 6), uneven(2, 1), cluster())
    net = Net(problem, 6)
    search = Search(net, None, net.rows(list_schedule(problem, 6)), seed=0, target_ms=0.0)
    sides = set()
    for move in [Move(rank, a, b) for rank in range(2) for a in range(12) for b in range(12) if a != b]:
        row, later = search.rows[move.rank][:], move.source < move.target
        node = row[move.source]
        passed = row[move.source + 1 : move.target + 1] if later else row[move.target : move.source]
        search.tabu.clear()
        if search._allowed(move.rank, move.source, move.target) and search._apply(move):
            sides.add(later)
            assert set(search.tabu) == {(node, other) if later else (other, node) for other in passed}
    assert sides == {False, True}


@pytest.mark.parametrize(("gb_per_s", "large"), [(1e-3, 5_000), (1e9, 1)])
def test_windows_stay_as_they_are_where_messages_queue_and_where_actions_are_many(gb_per_s, large, monkeypatch):
    monkeypatch.setattr(improve, "_NODES_A_ROUND", 1_000)
    monkeypatch.setattr(improve, "_LARGE", large)
    monkeypatch.setattr(improve, "reordered", lambda *a, **k: pytest.fail("a window was solved"))
    link = Link(bandwidth_gb_per_s=gb_per_s, latency_us=0)
    problem = Problem(plan(Placement.wave(2), 3), uniform(4, output_bytes=10**4), cluster(link))
    improver = Improver(
        problem=problem, split=False, cap=None, target_ms=0.0, seed=0, deadline=float("inf"), keep=lambda order: True
    )
    improver.improve([list_schedule(problem, 3)])
    assert improver.net.queues is (large > 1)


def test_what_windows_made_better_is_searched_again(monkeypatch):
    problem = Problem(plan(Placement.wave(2), 6), uniform(4), cluster())
    order, done = list_schedule(problem, 6), []
    improver = Improver(
        problem=problem, split=False, cap=None, target_ms=0.0, seed=0, deadline=float("inf"), keep=lambda order: True
    )
    every = ["window"] * len(windows(Paths(improver.net, improver.net.rows(order))))

    def first_window_only(net, rows, *a, **k):
        done.append("window")
        return rows if len(done) == 2 else None

    monkeypatch.setattr(Improver, "_exhaust", lambda *a: done.append("search"))
    monkeypatch.setattr(improve, "reordered", first_window_only)
    improver.improve([order])
    assert done == ["search", *every, "search", *every]


def test_what_takes_nothing_of_a_stash_may_run_later_whatever_the_limit():
    """A limit that was lowered may be below what a row holds already."""
    problem = Problem(plan(Placement.wave(2), 3), uniform(4), cluster())
    net = Net(problem, 3, split=True)
    search = Search(net, count_cap(problem, 6), net.rows(list_schedule(problem, 3, split=True)), seed=0, target_ms=0.0)
    search.reject(search.best_rows, search.best_ms, 0.1)
    later = [
        search._fits(rank, at, at + 1)
        for rank, row in enumerate(search.rows)
        for at, node in enumerate(row[:-1])
        if net.actions[node].op is Op.INPUT_GRAD
    ]
    assert later and all(later)


def test_a_pattern_extends_to_any_number_of_microbatches():
    small = Problem(plan(Placement.wave(4), 12), uniform(8), cluster())
    order = dualpipev(4, 12)
    starts = {span.work: span.start_ms for span in run(small, order).spans}
    for microbatches in (13, 20, 31):
        large = Problem(plan(Placement.wave(4), microbatches), uniform(8), cluster())
        net = Net(large, microbatches)
        rows = [net.rows(found) for found in unrolled(order, starts, microbatches)]
        sound = [net.schedule(row) for row in rows if net.chained(row)]
        extra = min(assert_sound(large, found).makespan_ms for found in sound) - run(small, order).makespan_ms
        assert extra == pytest.approx(6 * (microbatches - 12))


def test_many_microbatches_are_solved_through_few(monkeypatch):
    """No known order is the best, of forty or of six; so one of six is searched for."""
    searched, made = [], Improver.__post_init__
    monkeypatch.setattr(
        Improver, "__post_init__", lambda self: (searched.append(self.problem.plan.microbatches), made(self))[1]
    )
    found = synthesize(
        plan(Placement.wave(2), 40),
        Job.of(plan(Placement.wave(2), 40), uneven(2, 2), cluster()),
        SearchOptions(solver_seconds=30),
    )
    assert found.estimate.gap < 1e-9
    assert searched == [40, 6]


def test_preemptive_bound_by_hand():
    """(head, tail, duration): the long tail that comes late interrupts; 4 + 1 + 5 is the longest way."""
    assert preemptive_ms([(0.0, 0.0, 6.0), (4.0, 5.0, 1.0)]) == 10.0
    assert preemptive_ms([(0.0, 7.0, 2.0), (0.0, 0.0, 3.0), (8.0, 1.0, 1.0)]) == 10.0
    assert preemptive_ms([]) == 0.0


@settings(max_examples=40, deadline=None)
@given(problems(), st.booleans())
def test_the_bound_is_below_every_list(problem, split):
    m = problem.plan.microbatches
    makespan = run(problem, list_schedule(problem, m, split=split)).makespan_ms
    assert lower_bound_ms(problem, m, split=split) <= makespan * (1 + 1e-9)


def test_windows_find_what_a_bad_order_misses_within_the_cap():
    """DualPipeV on uneven stages, P=3, M=4 with 7 half-stages: HiGHS alone reaches the bound window by window."""
    problem = Problem(plan(Placement.wave(3), 4), uneven(3, 2), cluster())
    net = Net(problem, 4)
    search = Search(net, count_cap(problem, 7), net.rows(dualpipev(3, 4)), seed=0, target_ms=0.0)
    rows = search.best_rows
    for number in range(len(windows(Paths(net, rows)))):
        window = windows(Paths(net, rows))[number]
        rows = reordered(net, rows, window, search.change, search.limits, seconds=60) or rows
    figures = assert_sound(problem, net.schedule(rows))
    assert figures.makespan_ms == pytest.approx(figures.lower_bound_ms)
    assert max(figures.peak_bytes) <= 7000
    assert reordered(net, rows, windows(Paths(net, rows))[0], search.change, search.limits, seconds=60) is None


@settings(max_examples=25, deadline=None)
@given(problems(max_ranks=3, max_microbatches=4), st.booleans(), st.integers(0, 3))
def test_rows_of_a_window_hold_for_the_order_known(problem, split, room):
    held = max(len(problem.plan.stages_of(rank)) for rank in range(problem.num_ranks))
    cap = count_cap(problem, held + room)
    m = problem.plan.microbatches
    net = Net(problem, m, split=split)
    assume(not net.queues)
    search = Search(net, cap, net.rows(list_schedule(problem, m, cap=cap, split=split)), seed=0, target_ms=0.0)
    paths = search.paths
    for window in windows(paths):
        model = window_model(paths, window)
        start = {node: paths.start(node) for node in model.nodes}
        value = {**start, "makespan": paths.span, **{p: float(start[p[0]] < start[p[1]]) for p in model.pairs}}
        for terms, right in (*model.rows(), *stash_rows(model, paths, search.change, search.limits)):
            assert sum(factor * value[variable] for variable, factor in terms) >= right - 1e-6
        assert all(model.earliest[node] - 1e-6 <= start[node] <= model.latest(node) + 1e-6 for node in model.nodes)
