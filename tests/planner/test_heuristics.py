"""Generators: valid for any problem, within their caps, and named errors."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import assert_sound, problems
from toys import cluster, gpipe, plan, rows, uniform, wave

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import (
    GENERATORS,
    byte_cap,
    count_cap,
    forward_only,
    generators_for,
    one_f_one_b,
)
from deepspeed_pulse.planner.schedules.listing import list_schedule


def frugal_wave(problem, microbatches):
    """Two P half-stages in flight in a V: 1F1B's memory."""
    held = max(len(problem.plan.stages_of(rank)) for rank in range(problem.num_ranks))
    return wave(problem, microbatches, count_cap(problem, problem.num_ranks * held))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_generator_is_sound_and_above_the_bound(problem):
    m = problem.plan.microbatches
    for name, generator in generators_for("auto", problem.placement).items():
        for order in generator.orders(problem, (None,), False):
            try:
                assert_sound(problem, order())
            except InfeasibleError:
                assert name == "wave"
    assert_sound(problem, gpipe(problem, m))
    assert_sound(problem, frugal_wave(problem, m))


@settings(max_examples=60, deadline=None)
@given(problems(), st.floats(1.0, 3.0))
def test_a_byte_cap_never_deadlocks_and_is_kept(problem, room):
    """One microbatch on a rank is what the cap must let through; activations then stay within it."""
    weights = byte_cap(problem, ()).weights
    single = [sum(weights[s] for s in problem.plan.stages_of(r)) for r in range(problem.num_ranks)]
    limits = tuple(room * one for one in single)
    order = wave(problem, problem.plan.microbatches, byte_cap(problem, limits))
    assert_sound(problem, order)
    for rank, row in enumerate(order):
        live = 0.0
        for action in row:
            live += weights[action.stage] * (1 if action.op.value == "F" else -1)
            assert live <= limits[rank] * (1 + 1e-6) + 1e-6


def test_an_impossible_cap_names_the_ranks():
    problem = Problem(plan(Placement.wave(2), 2), uniform(4, activation_bytes=10), cluster())
    with pytest.raises(InfeasibleError, match="rank 1 needs 20 bytes, its limit is 19"):
        wave(problem, 2, byte_cap(problem, (20.0, 19.0)))


def test_a_capped_wave_keeps_two_p_half_stages_and_beats_one_f_one_b():
    """At 1F1B's memory (cap 8 at P=4, M=8) the V takes 64 half-stages where 1F1B takes 66."""
    problem = Problem(plan(Placement.wave(4), 8), uniform(8), cluster())
    figures = assert_sound(problem, frugal_wave(problem, 8))
    assert max(figures.peak_bytes) == 8
    assert figures.makespan_ms < 66


@pytest.mark.parametrize(("microbatches", "free", "capped"), [(375, 15, 14), (376, 7, 6), (2500, 7, 6), (2501, 2, 1)])
def test_fewer_waves_are_tried_where_each_takes_long(microbatches, free, capped):
    problem = Problem(plan(Placement.wave(2), microbatches), uniform(4), cluster())
    for cap, count in ((None, free), (count_cap(problem, 9), capped)):
        assert sum(1 for _ in GENERATORS["wave"].orders(problem, (cap,), False)) == count


def test_gpipe_runs_all_forwards_first():
    problem = Problem(plan(Placement.wave(2), 2), uniform(4), cluster())
    assert [[a.op.value for a in row] for row in gpipe(problem, 2)] == [list("FFFFBBBB")] * 2


def test_one_f_one_b_by_hand():
    problem = Problem(plan(Placement.linear(3), 4), uniform(3), cluster())
    assert one_f_one_b(problem, 4) == rows(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3", "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_forward_only_by_hand():
    assert forward_only(Placement.wave(2), 3) == rows("0F0 0F1 0F2 3F0 3F1 3F2", "1F0 2F0 1F1 2F1 1F2 2F2")


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 4))
def test_every_generator_is_sound_with_split_backward(problem, room):
    """Also under a cap: one microbatch a rank and some more."""
    weights = byte_cap(problem, ()).weights
    single = [sum(weights[s] for s in problem.plan.stages_of(r)) for r in range(problem.num_ranks)]
    cap = byte_cap(problem, tuple((1 + room / 2) * one for one in single))
    for generator in generators_for("auto", problem.placement, split=True).values():
        for order in generator.orders(problem, (None, cap), True):
            with contextlib.suppress(InfeasibleError):
                assert_sound(problem, order())


@pytest.mark.parametrize(
    "placement", [Placement.wave(3), Placement.wave(1, 2), Placement.linear(3), Placement.loop(2, 3)]
)
def test_capped_split_lists_fit_and_finish(placement):
    problem = Problem(plan(placement, 5), uniform(len(placement)), cluster())
    held = len(placement) // (max(placement) + 1)
    for count in range(held, 3 * held):
        order = list_schedule(problem, 5, cap=count_cap(problem, count), split=True)
        assert max(assert_sound(problem, order).peak_bytes) <= count


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (1, 4), (2, 3), (2, 4), (3, 6), (4, 8), (4, 16), (5, 12), (8, 16), (8, 32)]
)
def test_closed_forms(ranks, microbatches):
    """ZB-V with 2P half-stages, DualPipeV with one more; interleaved for M a multiple of P."""

    def figures(name, placement, layers):
        split = GENERATORS[name].needs_split
        problem = Problem(plan(placement, microbatches), uniform(layers, **UNIT[layers // ranks]), cluster())
        orders = [order() for order in GENERATORS[name].orders(problem, (None,), split)]
        return min((f.makespan_ms, max(f.peak_bytes)) for f in (assert_sound(problem, order) for order in orders))

    if microbatches >= 2 * ranks - 1:
        assert figures("zbv", Placement.wave(ranks), 2 * ranks) == (6 * microbatches + ranks - 1, 2 * ranks)
    if microbatches >= 2 * ranks > 2:
        dualpipev, peak = figures("dualpipev", Placement.wave(ranks), 2 * ranks)
        assert (dualpipev, peak) == (6 * microbatches + 4 * ranks - 5, 2 * ranks + 1)
    if microbatches >= ranks:
        assert figures("1f1b", Placement.linear(ranks), ranks)[0] == 6 * microbatches + 6 * (ranks - 1)
    if microbatches % ranks == 0:
        interleaved, _ = figures("interleaved", Placement.linear(ranks) * 2, 2 * ranks)
        assert interleaved == 6 * microbatches + 3 * (ranks - 1)


UNIT = {1: {"forward_ms": 2.0, "backward_ms": 4.0}, 2: {}}
"""Per stages a rank: layers of which a rank's forward takes 2, its backward 4."""


def test_controllable_memory():
    """V-Half stays near half, V-Min near a third of 1F1B's 2P half-stages, and both beat GPipe's time at P=8."""
    problem = Problem(plan(Placement.wave(8), 32), uniform(16), cluster())
    for name, share, slack in (("vhalf", 1 / 2, 3), ("vmin", 1 / 3, 3)):
        found = [assert_sound(problem, order()) for order in GENERATORS[name].orders(problem, (None,), True)]
        assert min(max(f.peak_bytes) for f in found) <= 16 * share + 1
        assert max(max(f.peak_bytes) for f in found) <= 16 * share + slack
        assert min(f.makespan_ms for f in found) < 6 * 32 + 6 * 7


def test_dualpipev_by_hand():
    problem = Problem(plan(Placement.wave(2), 4), uniform(4), cluster())
    (order,) = GENERATORS["dualpipev"].orders(problem, (None,), False)
    assert order() == rows(
        "0F0 0F1 0F2 3F0 3B0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0B2 0B3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2B3 1B3",
    )


def test_a_schedule_that_is_not_there_lists_those_that_are():
    with pytest.raises(ConfigError, match=r"schedule 'wavy' is not available.*1f1b, inter.*fit placement wave"):
        generators_for("wavy", Placement.wave(2))


@pytest.mark.parametrize("name", ["zbv", "vhalf", "vmin"])
def test_a_schedule_that_splits_backward_must_be_allowed_to(name):
    with pytest.raises(ConfigError, match=f"'{name}' does not fit placement wave of 2 ranks without split backward"):
        generators_for(name, Placement.wave(2))
    assert list(generators_for(name, Placement.wave(2), split=True)) == [name]
    with pytest.raises(ConfigError, match=f"'{name}' does not fit placement linear of 2 ranks; those that do: 1f1b"):
        generators_for(name, Placement.linear(2), split=True)


def test_a_schedule_that_does_not_fit_lists_those_that_do():
    with pytest.raises(ConfigError, match="'1f1b' does not fit placement wave of 2 ranks; those that do: wave, dual"):
        generators_for("1f1b", Placement.wave(2))
    assert set(generators_for("auto", Placement.linear(2))) == {"1f1b", "wave", "gpipe"}
    assert set(generators_for("auto", Placement.loop(2, 2))) == {"interleaved", "wave", "gpipe"}
