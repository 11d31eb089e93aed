"""Layers that run again in backward: what they cost, what they free, and how few are chosen."""

import random
from dataclasses import replace

import pytest
from support.asked import asked
from toys import cluster, layer, plan, profile, random_profile, rows, skip, uniform

from deepspeed_pulse.errors import ConfigError, FileError, InfeasibleError
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Held
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.ir.schedule import Action, Op
from deepspeed_pulse.planner import Job, SearchOptions, check, estimate, make_plan, reorder, simulate, violations
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.recompute import cheapest_first, held_in_actions, with_recompute

SIZES = profile(
    [
        layer(1, 2, activation_bytes=100, output_bytes=10),
        layer(3, 4, activation_bytes=200, output_bytes=20),
        layer(5, 6, activation_bytes=300, output_bytes=30),
    ],
    [skip("a", 1, 2, 7)],
)

ALL = plan((0,), 1, boundaries=(0, 3))
"""Three layers as one stage."""


def alone(*recompute):
    """All three layers as one stage on one rank, two microbatches, forwards first."""
    schedule = rows("0F0 0F1 0B0 0B1")
    return replace(plan((0,), 2, boundaries=(0, 3), schedule=schedule, of=SIZES), recompute=recompute)


def test_a_recomputed_layer_keeps_its_input_and_what_it_stashes_and_runs_its_forward_again():
    found = with_recompute(SIZES, [1])
    assert [x.activation_bytes for x in found.layers] == [100, 10 + 7, 300]
    assert [(x.forward_ms, x.backward_ms) for x in found.layers] == [(1, 2), (3, 4 + 3), (5, 6)]
    assert with_recompute(SIZES, []) is SIZES


def test_time_and_memory_by_hand():
    none, some = (simulate(alone(*layers), SIZES, cluster()) for layers in ([], [1, 2]))
    assert (none.makespan_ms, some.makespan_ms) == (2 * 9 + 2 * 12, 2 * 9 + 2 * (12 + 3 + 5))
    assert max(b for _, b in none.memory[0]) == 2 * 600
    kept = 100 + (10 + 7) + 20
    assert some.memory[0] == ((0.0, kept), (9.0, 2 * kept), (18.0, 2 * kept + 300), (38.0, kept + 300), (58.0, 0))


def test_split_backward_repeats_the_forward_in_its_input_half_and_holds_it_to_the_weight_half():
    problem = Problem(alone(1, 2), SIZES, cluster())
    assert problem.duration_ms(Action(0, Op.INPUT_GRAD, 0)) == 6 + 3 + 5
    assert problem.duration_ms(Action(0, Op.WEIGHT_GRAD, 0)) == 6
    split = replace(alone(1, 2), schedule=rows("0F0 0I0 0F1 0I1 0W0 0W1"))
    kept = 100 + 17 + 20
    peak = max(b for _, b in simulate(split, SIZES, cluster()).memory[0])
    assert peak == 2 * (kept + 200 + 300)


def test_none_all_and_lists():
    costs = replace(uniform(4), layers=tuple(replace(layer(), name=name) for name in "abcd"))
    ways = {"none": (), "all": (0, 1, 2, 3), "auto": (), ("d", 1): (1, 3), ("2", "a"): (0, 2)}
    for choice, expected in ways.items():
        found = make_plan(
            Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2, recompute=choice),
            SearchOptions(solver_seconds=0),
        )
        assert found.recompute == expected
        assert found.estimate == estimate(found, costs, cluster())
        assert Plan.from_json(found.to_json()) == found
    wrong = {"some": "none, all, auto", ("e",): "0 layers are called 'e'", (4,): "0..3, found 4"}
    for bad, text in (wrong | {("9" * 5000,): "0 layers are called '9999"}).items():
        with pytest.raises(ConfigError, match=text):
            make_plan(Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2, recompute=bad))


@pytest.mark.parametrize(("workspace", "held"), [(50, Held(30, 0)), (90, Held(0, 50))])
def test_a_backward_holds_a_layer_that_runs_again_or_one_that_works(workspace, held):
    """Layer 3 has freed 40 bytes when the others run; before the weight half both run again."""
    sizes = ((10, 5), (20, workspace), (30, 7), (40, 1))
    costs = profile([layer(activation_bytes=kept, workspace_bytes=works) for kept, works in sizes])
    found = replace(plan((0,), 1, boundaries=(0, 4)), recompute=(0, 2))
    (whole,), (halves,) = held_in_actions(costs, found), held_in_actions(costs, found, split=True)
    assert (whole.recomputed, whole.workspace) == (held.recomputed, held.workspace)
    assert (halves.recomputed, halves.workspace) == (40, 0)


def test_a_forward_and_a_weight_half_work_with_less_than_a_backward():
    """Later layers have not kept anything yet when a forward works; a weight half has freed what they kept for it."""
    kept, works, forward, weights, late = (10, 20, 30), (90, 70, 60), (65, 51, 7), (100, 41, 6), (1, 2, 4)
    layers = [
        layer(
            activation_bytes=kept[i],
            workspace_bytes=works[i],
            forward_workspace_bytes=forward[i],
            weight_workspace_bytes=weights[i],
            late_bytes=late[i],
        )
        for i in range(3)
    ]
    (whole,), (halves,) = (held_in_actions(profile(layers), ALL, split=split) for split in (False, True))
    assert (whole.workspace, whole.forward) == (60, max(65 - 50, 51 - 30, 7))
    assert (halves.forward, halves.weights) == (whole.forward, max(100 - 20 - 30 - 2 - 4, 41 - 30 - 4, 6))


def test_gradients_that_a_backward_makes_take_the_room_of_what_layers_free():
    """The last layer frees 10 of which its gradients take 4; where both run again nothing is freed."""
    layers = [layer(activation_bytes=10, workspace_bytes=works, weight_workspace_bytes=works) for works in (9, 1)]
    costs = profile([replace(x, param_bytes=4) for x in layers])
    both = plan((0,), 1, boundaries=(0, 2))
    (kept,), (halves,) = (held_in_actions(costs, both, split=split, fresh=True) for split in (False, True))
    assert (kept.workspace, halves.workspace, halves.weights) == (max(9 + 4 - 10 + 4, 1 + 4), 0, 9 + 4 - 10 + 4)
    (again,) = held_in_actions(costs, replace(both, recompute=(0, 1)), fresh=True)
    assert (again.recomputed, again.workspace) == (10, 9 + 4 + 4)


@pytest.mark.parametrize(("dtype", "zero", "more"), [("bfloat16", 0, 4), ("bfloat16", 1, 0), ("float16", 0, 0)])
def test_a_backward_in_bf16_makes_gradients_beside_the_optimizers_sums(dtype, zero, more):
    costs = profile([replace(layer(), param_bytes=4)], dtype=dtype)
    found = replace(plan((0,), 1, boundaries=(0, 1)), rules=Rules.of(zero))
    assert Problem(found, costs, cluster()).held_in_actions(0).workspace == more


@pytest.mark.parametrize(("known", "interval", "expected"), [(25, 1, 25 - 8), (25, 3, 25 + 5), (None, 1, 9 - 8)])
def test_a_forward_that_keeps_nothing_holds_what_it_works_with(known, interval, expected):
    """The middle one of three layers, with 9 to work with, reads 5 bytes; the last one will keep 8."""
    middle = layer(activation_bytes=20, output_bytes=8, workspace_bytes=9, rerun_workspace_bytes=known)
    costs = profile([layer(output_bytes=5), middle, layer()])
    (held,) = held_in_actions(costs, replace(ALL, recompute=(0, 1, 2)), interval=interval)
    assert held.forward == expected


def test_input_halves_work_before_layers_in_front_have_kept_anything():
    """Layer 2 works with 60 beside its 10; then layer 1 with 20 beside 10 + 30, and layer 0 with 5 beside all."""
    sizes = ((4, 5), (30, 20), (10, 60))
    layers = [layer(late_bytes=late, halves_workspace_bytes=works) for late, works in sizes]
    (held,) = held_in_actions(profile(layers), ALL, split=True)
    assert (held.late, held.late + held.workspace) == (44, 70)


def test_what_a_layer_has_read_is_there_when_it_runs_again():
    """Of a run's first layer only: what the others read is made anew. A profile that does not say counts all."""
    sizes = ((10, 4), (20, 15), (30, None))
    costs = profile([layer(activation_bytes=kept, rerun_bytes=again) for kept, again in sizes])
    found = replace(plan((0,), 1, boundaries=(0, 3)), recompute=(0, 1, 2))
    held = [held_in_actions(costs, found, interval=interval)[0].recomputed for interval in (1, 2, 3)]
    assert held == [30, 30, 4 + 20 + 30]


def test_auto_recomputes_no_more_than_the_memory_needs():
    """One rank keeps three microbatches of 50 + 50 + 100 + 10 bytes; a recomputed layer keeps its input, 1 byte.

    Layer 2 frees most for a millisecond, then 1; with 0 as well, 1 is not needed any more.
    """
    costs = profile([layer(f, 2, activation_bytes=a, output_bytes=1) for f, a in ((4, 50), (1, 50), (1, 100), (9, 10))])
    options = {"cluster": cluster(), "pipeline_ranks": 1, "microbatches": 3, "placement": "linear", "schedule": "gpipe"}
    expected = {630: (), 629: (2,), 433: (2,), 432: (1, 2), 286: (1, 2), 285: (0, 2)}
    for memory, layers in expected.items():
        found = make_plan(*asked(costs, memory_bytes=memory, recompute="auto", solver_seconds=0, **options))
        assert found.recompute == layers, memory
        assert max(found.estimate.peak_bytes) <= memory
    with pytest.raises(InfeasibleError, match=r"no schedule found.*recomputing layers in backward does not help"):
        make_plan(*asked(costs, memory_bytes=108, recompute="auto", solver_seconds=0, **options))


@pytest.mark.parametrize("seed", range(8))
def test_auto_fits_where_nothing_else_does(seed):
    rng = random.Random(seed)
    costs = random_profile(rng, 14, temb=True)
    costs = replace(
        costs, layers=tuple(replace(x, activation_bytes=(x.activation_bytes + 20) * 600) for x in costs.layers)
    )
    options = {"cluster": cluster(), "pipeline_ranks": 2, "microbatches": 6, "solver_seconds": 0.2 * (seed % 2)}
    least = max(make_plan(*asked(costs, memory_bytes=None, recompute="all", **options)).estimate.peak_bytes)
    cap = int(1.7 * least)
    with pytest.raises(InfeasibleError):
        make_plan(*asked(costs, memory_bytes=cap, **options))
    found = make_plan(*asked(costs, memory_bytes=cap, recompute="auto", **options))
    check(found, num_layers=costs.num_layers, values=costs.values)
    assert max(found.estimate.peak_bytes) <= cap
    assert found.recompute
    more = reorder(found, Job.of(found, costs, cluster(), microbatches=2), SearchOptions(solver_seconds=0))
    assert more.recompute == found.recompute


def test_cheapest_first_leaves_out_what_frees_nothing():
    costs = profile(
        [
            layer(2, 4, activation_bytes=40, output_bytes=30),
            layer(1, 2, activation_bytes=30),
            layer(1, 2, activation_bytes=9),
        ]
    )
    assert cheapest_first(costs) == [0, 2]


@pytest.mark.parametrize("bad", ["[3]", "[1, 1]", "[2, 1]", "[-1]", '["a"]', "[true]", "1"])
def test_a_plan_file_with_a_bad_list_is_refused(bad):
    text = alone(1).to_json().replace('"recompute": [\n  1\n ]', f'"recompute": {bad}')
    with pytest.raises(FileError, match="field 'recompute': expected"):
        Plan.from_json(text)


def test_absent_empty_and_null_mean_none():
    assert "recompute" not in alone().to_json()
    for written in ("[]", "null"):
        text = alone(1).to_json().replace('"recompute": [\n  1\n ]', f'"recompute": {written}')
        assert Plan.from_json(text) == alone()


def test_the_validator_names_layers_that_are_not_there():
    found = violations(replace(alone(), recompute=(1, 7)), num_layers=3, values=SIZES.values)
    assert found == ["recompute: the model has layers 0..2, found 7"]


def test_of_a_layer_that_runs_again_only_what_it_stashes_keeps_its_output():
    layers = [layer(output_bytes=8, unkept_output_bytes=0) for _ in range(3)]
    found = with_recompute(profile(layers, [skip("kept", 0, 2, size=8)]), [0, 1])
    assert [one.unkept_output_bytes for one in found.layers] == [0, None, 0]
