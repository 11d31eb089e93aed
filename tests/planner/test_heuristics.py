"""Generators: valid for any instance, within their caps, and named errors."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import cluster, plan, random_profile, rows, uniform

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.placement import linear_placement, wave_placement
from deepspeed_pulse.planner.heuristics import (
    GENERATORS,
    byte_cap,
    forward_only,
    generators_for,
    gpipe,
    memory_frugal,
    one_f_one_b,
    wave,
)
from deepspeed_pulse.planner.instance import Instance
from deepspeed_pulse.planner.routes import named_values
from deepspeed_pulse.planner.simulate import run, summarize
from deepspeed_pulse.planner.validate import violations


@st.composite
def instances(draw):
    kind = draw(st.sampled_from(["wave", "linear", "loop"]))
    ranks, waves = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    placement = {
        "wave": wave_placement(ranks, waves),
        "linear": linear_placement(ranks),
        "loop": linear_placement(ranks) * 2,
    }[kind]
    rng = random.Random(draw(st.integers(0, 10**6)))
    costs = random_profile(rng, len(placement), temb=rng.random() < 0.5, strict=False)
    link = Link(bandwidth_gb_per_s=draw(st.sampled_from([1e-4, 1e-3, 1e9])), latency_us=draw(st.sampled_from([0, 500])))
    return Instance(plan(placement, draw(st.integers(1, 6)), of=costs), costs, cluster(link))


def assert_sound(instance, schedule):
    found = replace(instance.plan, schedule=schedule)
    values = named_values(instance.profile)
    assert violations(found, num_layers=instance.profile.num_layers, values=values) == []
    figures = summarize(instance, run(instance, schedule))
    assert figures.makespan_ms >= figures.lower_bound_ms * (1 - 1e-9)
    return figures


@settings(max_examples=60, deadline=None)
@given(instances())
def test_every_generator_is_sound_and_above_the_bound(instance):
    m = instance.plan.microbatches
    for name, generator in generators_for("auto", instance.placement).items():
        for order in generator.orders(instance, m, (None,)):
            try:
                assert_sound(instance, order())
            except InfeasibleError:
                assert name == "wave"
    assert_sound(instance, gpipe(instance, m))
    assert_sound(instance, memory_frugal(instance, m))


@settings(max_examples=60, deadline=None)
@given(instances(), st.floats(1.0, 3.0))
def test_a_byte_cap_never_deadlocks_and_is_kept(instance, room):
    """One microbatch on a rank is what the cap must let through; activations then stay within it."""
    weights = byte_cap(instance, ()).weights
    single = [sum(weights[s] for s in instance.plan.stages_of(r)) for r in range(instance.num_ranks)]
    limits = tuple(room * one for one in single)
    order = wave(instance, instance.plan.microbatches, byte_cap(instance, limits))
    assert_sound(instance, order)
    for rank, row in enumerate(order):
        live = 0.0
        for action in row:
            live += weights[action.stage] * (1 if action.op.value == "F" else -1)
            assert live <= limits[rank] * (1 + 1e-6) + 1e-6


def test_an_impossible_cap_names_the_ranks():
    instance = Instance(plan(wave_placement(2), 2), uniform(4, activation_bytes=10), cluster())
    with pytest.raises(InfeasibleError, match="rank 1 needs 20 bytes, its limit is 19"):
        wave(instance, 2, byte_cap(instance, (20.0, 19.0)))


def test_memory_frugal_keeps_two_p_half_stages_and_beats_one_f_one_b():
    """At 1F1B's memory (cap 8 at P=4, M=8) the V takes 64 half-stages where 1F1B takes 66."""
    instance = Instance(plan(wave_placement(4), 8), uniform(8), cluster())
    figures = assert_sound(instance, memory_frugal(instance, 8))
    assert max(figures.peak_bytes) == 8
    assert figures.makespan_ms < 66


def test_gpipe_runs_all_forwards_first():
    instance = Instance(plan(wave_placement(2), 2), uniform(4), cluster())
    assert [[a.op.value for a in row] for row in gpipe(instance, 2)] == [list("FFFFBBBB")] * 2


def test_one_f_one_b_by_hand():
    instance = Instance(plan(linear_placement(3), 4), uniform(3), cluster())
    assert one_f_one_b(instance, 4) == rows(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3", "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_forward_only_by_hand():
    assert forward_only(wave_placement(2), 3) == rows("0F0 0F1 0F2 3F0 3F1 3F2", "1F0 2F0 1F1 2F1 1F2 2F2")


@pytest.mark.parametrize("name", ["interleaved", "dualpipev", "zbv", "vhalf", "vmin", "wavy"])
def test_a_schedule_that_is_not_there_lists_those_that_are(name):
    with pytest.raises(ConfigError, match=f"schedule '{name}' is not available.*1f1b, wave, gpipe.*fit placement wave"):
        generators_for(name, wave_placement(2))


def test_a_schedule_that_does_not_fit_lists_those_that_do():
    with pytest.raises(ConfigError, match="'1f1b' does not fit placement wave of 2 ranks; those that do: wave, gpipe"):
        generators_for("1f1b", wave_placement(2))
    assert set(generators_for("auto", linear_placement(2))) == set(GENERATORS)
