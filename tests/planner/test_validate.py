"""Every violation is found, named and placed; sound plans have none."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import cluster, layer, plan, profile, random_profile, rows, skip, uniform, wave

from deepspeed_pulse.errors import PlanError
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Route
from deepspeed_pulse.planner import check, simulate, violations
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import count_cap

VALUES = profile([layer() for _ in range(4)], [skip("temb", 0, 1), skip("temb", 0, 3), skip("odd", 1, 3)])


def sound(microbatches=2):
    blank = plan(Placement.wave(2), microbatches, of=VALUES)
    return replace(blank, schedule=wave(Problem(blank, VALUES, cluster()), microbatches))


def found(broken, num_layers=4):
    return violations(broken, num_layers=num_layers, values=VALUES.values)


def test_a_sound_plan_has_none():
    assert found(sound()) == []
    check(sound(), num_layers=4, values=VALUES.values)


def test_halves_of_a_backward_are_as_good_as_the_whole():
    split = rows("0F0 0I0 0W0", "1F0 1I0 1W0")
    assert violations(plan((0, 1), 1, schedule=split), num_layers=2, values=()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundaries": (0, 1, 2, 3, 5)}, "boundaries: the plan cuts 5 layers, the model has 4"),
        ({"boundaries": (1, 2, 3, 3, 4)}, "boundaries: stage 2 has no layer"),
        ({"boundaries": (1, 2, 3, 3, 4)}, "boundaries: the first stage starts at layer 1"),
        ({"boundaries": (0, 2, 4)}, "boundaries: expected 5 for 4 stages, found 3"),
        ({"placement": (0, 2, 0, 0)}, "placement: rank 2 is not one of the 2 pipeline ranks"),
        ({"placement": (0, 2, 0, 0)}, "placement: rank 1 holds no stage"),
        ({"schedule": rows("0F0")}, "schedule: expected one row for each of the 2 ranks, found 1"),
        ({"routes": ()}, "route 'temb': never reaches rank 1, whose stage 1 reads it"),
        ({"routes": ()}, "route 'odd': never reaches rank 0, whose stage 3 reads it"),
    ],
)
def test_shape_and_missing_routes(changes, message):
    assert any(line.startswith(message) for line in found(replace(sound(), **changes))), found(
        replace(sound(), **changes)
    )


def route(name, source, *hops):
    return Route(name=name, source_stage=source, hops=hops)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([route("temb", 0, (0, 1)), route("odd", 1, (1, 3)), route("tembb", 0)], "has no such value (did you mean"),
        ([route("temb", 1, (0, 1)), route("odd", 1, (1, 3))], "starts at stage 1, its producer is in stage 0"),
        ([route("temb", 0, (1, 2)), route("odd", 1, (1, 3))], "hop 1 -> 2 starts where the value is not"),
        ([route("temb", 0, (0, 2)), route("odd", 1, (1, 3))], "reaches rank 1 at stage 2, after its stage 1 reads it"),
        ([route("temb", 0, (0, 1), (0, 2)), route("odd", 1, (1, 3))], "hop 0 -> 2 visits rank 1 a second time"),
        ([route("temb", 0, (0, 1)), route("odd", 1, (2, 0))], "hop 2 -> 0 runs backwards"),
        ([route("temb", 0, (0, 9)), route("odd", 1, (1, 3))], "names a stage outside 0..3"),
        ([route("temb", 0, (0, 1)), route("temb", 0, (0, 1)), route("odd", 1, (1, 3))], "'temb': listed twice"),
    ],
)
def test_broken_routes(routes, message):
    lines = found(replace(sound(), routes=tuple(routes)))
    assert any(message in line for line in lines), lines


def test_a_dead_end_is_a_violation():
    costs = profile([layer() for _ in range(3)], [skip("v", 0, 1)])
    order = rows("0F0 0B0", "1F0 1B0", "2F0 2B0")
    broken = replace(plan((0, 1, 2), 1, schedule=order), routes=(route("v", 0, (0, 1), (1, 2)),))
    assert violations(broken, num_layers=3, values=costs.values) == [
        "route 'v': goes to rank 2, which neither reads it nor passes it on"
    ]


def test_the_microbatches_and_stages_there_are_are_named():
    row = "0F0 0B0 1F0 1B0 2F0 2B0 3F0 3B0"
    for wrong, there in (("0F4", "microbatch (0..3): 0F4"), ("4F0", "stage (0..3): 4F0")):
        found = plan((0,) * 4, 4, schedule=rows(f"{row} {wrong}"))
        assert any(there in line for line in violations(found, num_layers=4, values=()))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (rows("0F0 0B0 0F1 0B1", "1F0 1B0 1F1"), "schedule of rank 1: never runs: 1B1"),
        (rows("0F0 0B0 0F1 0B1 0B1", "1F0 1B0 1F1 1B1"), "rank 0: runs more than once: 0B1 (2 times)"),
        (rows("0F0 0B0 0F1 0B1 1F0", "1F0 1B0 1F1 1B1"), "rank 0: stage 1 belongs to rank 1: 1F0"),
        (rows("0F0 0B0 0F1 0B1 0F2", "1F0 1B0 1F1 1B1"), "rank 0: there is no such microbatch (0..1): 0F2"),
        (rows("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1 7F0"), "rank 1: there is no such stage (0..1): 7F0"),
        (rows("0F0 0B0 0F1 0B1", "1F0 1B0 1B1 1F1"), "rank 1: runs before what it needs: 1B1 before 1F1"),
        (rows("0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), "microbatches are not in order within a stage: 0F1 before 0F0"),
        (rows("0F0 0B0 0F1 0B1 0I1 0W1", "1F0 1B0 1F1 1B1"), "runs both whole and in halves: 0B1 and 0I1"),
        (rows("0F0 0B0 0F1 0I1", "1F0 1B0 1F1 1B1"), "schedule of rank 0: never runs: 0W1"),
    ],
)
def test_broken_schedules(schedule, message):
    lines = violations(plan((0, 1), 2, schedule=schedule), num_layers=2, values=())
    assert any(message in line for line in lines), lines


@pytest.mark.parametrize(("cuts", "layers"), [((0, 1, 2), 3), ((0, 1, 2), 1), ((), 2)])
def test_a_plan_of_fewer_or_more_layers_is_another_models(cuts, layers):
    order = rows("0F0 0B0", "1F0 1B0")
    lines = violations(replace(plan((0, 1), 1, schedule=order), boundaries=cuts), num_layers=layers, values=())
    assert lines[0] == (
        f"boundaries: the plan cuts {cuts[-1] if cuts else 0} layers, the model has {layers}; it was made for another "
        "model"
    )


def test_of_a_backward_that_also_runs_in_halves_the_first_half_is_marked():
    broken = plan((0, 1), 1, schedule=rows("0F0 0B0 0I0 0W0", "1F0 1B0"))
    with pytest.raises(PlanError, match=r"rank 0: 0F0 0B0 >>0I0<< 0W0"):
        check(broken, num_layers=2, values=())


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [
        (rows("0B0 0F1 0B1", "1F0 1B0 1F1 1B1"), "schedule of rank 0: never runs: 0F0"),
        (rows("0F0 0W0 0F1 0B1", "1F0 1B0 1F1 1B1"), "schedule of rank 0: never runs: 0I0"),
    ],
)
def test_what_never_runs_is_not_said_to_run_too_late(schedule, missing):
    lines = violations(plan((0, 1), 2, schedule=schedule), num_layers=2, values=())
    assert [line for line in lines if line.startswith("schedule")] == [missing]


def test_of_many_actions_some_are_shown_and_the_rest_is_counted():
    order = rows("0F0 0B0", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5")
    lines = violations(plan((0, 1), 6, schedule=order), num_layers=2, values=())
    assert lines[0] == "schedule of rank 0: never runs: 0F1, 0B1, 0F2, 0B2 and 6 more"


def test_all_are_listed_at_once_and_marked_in_the_rows():
    broken = plan((0, 1), 2, schedule=rows("0F0 0F1 0B1 0B0", "1B0 1F0 1F1"))
    with pytest.raises(PlanError) as caught:
        check(broken, num_layers=2, values=())
    text = str(caught.value)
    for part in ("1B0 before 1F0", "0B1 before 0B0", "never runs: 1B1", "deadlock: rank 0", "deadlock: rank 1"):
        assert part in text
    assert "rank 0: 0F0 0F1 >>0B1<< >>0B0<<" in text
    assert "rank 1: >>1B0<< 1F0 1F1" in text


def test_a_deadlock_of_sound_rows_names_each_rank():
    order = rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert violations(plan((0, 1), 2, schedule=order), num_layers=2, values=()) == [
        "deadlock: rank 0 is stuck at 0B0, which waits for 1B0 of rank 1",
        "deadlock: rank 1 is stuck at 1F1, which waits for 0F1 of rank 0",
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_swapping_a_forward_with_its_backward_is_always_caught_and_named(seed):
    rng = random.Random(seed)
    placement = rng.choice([Placement.wave(2), Placement.wave(3), Placement.linear(3)])
    blank = plan(placement, 3)
    order = [list(row) for row in wave(Problem(blank, uniform(len(placement)), cluster()), 3)]
    row = rng.choice(order)
    stage, m = rng.choice(row).stage, rng.randrange(3)
    first, second = (i for i, a in enumerate(row) if (a.stage, a.microbatch) == (stage, m))
    row[first], row[second] = row[second], row[first]
    broken = replace(blank, schedule=tuple(map(tuple, order)))
    lines = violations(broken, num_layers=len(placement), values=())
    assert any("runs before what it needs" in line and f"{stage}B{m} before {stage}F{m}" in line for line in lines)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_a_damaged_schedule_is_named_or_runs(seed):
    """Actions swapped, dropped, doubled or moved to another rank: no violation means that it can be simulated."""
    rng = random.Random(seed)
    costs = random_profile(rng, 6, temb=True, strict=False)
    placement = rng.choice([Placement.wave(3), Placement.wave(2), Placement.linear(3), (0, 1, 0, 1)])
    bounds = (0, *sorted(rng.sample(range(1, 6), len(placement) - 1)), 6)
    blank = plan(placement, 3, boundaries=bounds, of=costs)
    problem = Problem(blank, costs, cluster())
    order = [list(row) for row in wave(problem, 3, count_cap(problem, len(placement)))]
    for _ in range(rng.randrange(1, 3)):
        damage(rng, order)
    damaged = replace(blank, schedule=tuple(map(tuple, order)))
    lines = violations(damaged, num_layers=6, values=costs.values)
    if lines:
        assert all(line.startswith(("schedule of rank ", "deadlock: rank ")) for line in lines), lines
    else:
        assert len(simulate(damaged, costs, cluster()).spans) == 2 * 3 * len(placement)


def damage(rng, order):
    kind, row, other = rng.randrange(4), rng.choice([row for row in order if row]), rng.choice(order)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    if kind == 0:
        row[i], row[j] = row[j], row[i]
    elif kind == 1:
        del row[i]
    elif kind == 2:
        row.insert(j, row[i])
    else:
        other.insert(0, row.pop(i))
