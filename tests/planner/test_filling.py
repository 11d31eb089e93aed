"""Frozen work in idle time: random plans stay sound, small problems are solved exactly, bad files are refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace

import pytest
from toys import cluster, layer, plan, profile, random_profile, rows, uniform

from deepspeed_pulse.errors import FileError, InfeasibleError, PlanError
from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.fields import Fields
from deepspeed_pulse.ir.fill import (
    Fill,
    Filling,
    FrozenLayer,
    FrozenPart,
    FrozenRun,
    HandOver,
    check_parts,
    parse_work,
)
from deepspeed_pulse.ir.frozen import FrozenParts
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.planner import Job, SearchOptions, estimate, make_plan, reorder, simulate, violations
from deepspeed_pulse.planner.filling.assignment import Assignment, gaps_of
from deepspeed_pulse.planner.filling.fill import allowed_ranks, fill_plan
from deepspeed_pulse.planner.making import ordered as ordering
from deepspeed_pulse.planner.problem import Problem


def part(name, *ms, needs=(), targets=(0,), size=1, params=1, ranks=None):
    layers = tuple(
        FrozenLayer(name=str(i), forward_ms=t, param_bytes=params, output_bytes=size, activation_bytes=2 * size)
        for i, t in enumerate(ms)
    )
    return FrozenPart(name=name, layers=layers, needs=needs, targets=targets, ranks=ranks)


def random_parts(rng, num_layers):
    first = part("latents", *(rng.uniform(0.1, 2) for _ in range(rng.randrange(1, 5))), size=rng.randrange(1, 2000))
    targets = tuple(sorted(rng.sample(range(num_layers), rng.randrange(1, 3))))
    needs = ("latents",) if rng.random() < 0.4 else ()
    second = part("text", *(rng.uniform(0.05, 0.5) for _ in range(rng.randrange(1, 4))), needs=needs, targets=targets)
    return [second, first] if rng.random() < 0.7 else [first]


def random_plan(rng):
    ranks = rng.randrange(1, 4)
    costs = random_profile(rng, rng.randrange(2 * ranks, 3 * ranks + 3), temb=rng.random() < 0.3)
    link = Link(
        bandwidth_gb_per_s=rng.choice([1e-3, 1e9]), latency_us=rng.choice([0, 300]), one_port=rng.choice([False, True])
    )
    machines = cluster(link)
    made = make_plan(
        Job(profile=costs, cluster=machines, pipeline_ranks=ranks, microbatches=rng.randrange(1, 5)),
        SearchOptions(solver_seconds=0.0),
    )
    return made, costs, machines


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(40, 100))])
def test_neither_memory_nor_order_is_broken(seed):
    rng = random.Random(seed)
    made, costs, machines = random_plan(rng)
    parts = random_parts(rng, costs.num_layers)
    alone = max(made.estimate.peak_bytes)
    cap = alone + rng.choice([10**6, 40_000, 3000, 5])
    found = {}
    for seconds in (0.0, 0.3):
        try:
            filled = fill_plan(
                made, Job.of(made, costs, machines, frozen=parts, memory_bytes=cap), solver_seconds=seconds
            )
        except InfeasibleError as problem:
            assert problem.needed_bytes > cap
            continue
        found[seconds] = filled.estimate.step_ms
        assert violations(filled, num_layers=costs.num_layers, values=costs.values) == []
        assert max(filled.estimate.peak_bytes) <= cap
        assert filled.estimate == estimate(filled, costs, machines)
        assert Plan.from_json(filled.to_json()) == filled
        assert filled.estimate.makespan_ms >= filled.estimate.lower_bound_ms * (1 - 1e-9)
        assert replace(filled, fill=None, estimate=made.estimate, solver=made.solver) == made
        if made.solver.optimal:  # what is added may end behind the bound
            reached = filled.estimate.makespan_ms <= filled.estimate.lower_bound_ms * (1 + 1e-9)
            assert filled.solver == replace(made.solver, optimal=reached)
    assert len(found) in (0, 2)
    if found:
        assert found[0.3] <= found[0.0] + 1e-9


def test_a_fill_is_never_slower_than_encoding_up_front():
    """Spread over the ranks, hand-overs in no time: the pipeline, and the longest share before it."""
    rng = random.Random(5)
    for _ in range(20):
        made, costs, machines = random_plan(rng)
        if machines.intra_node.latency_us or machines.intra_node.bandwidth_gb_per_s < 1:
            continue
        parts = random_parts(rng, costs.num_layers)
        filled = fill_plan(made, Job.of(made, costs, machines, frozen=parts), solver_seconds=0.0)
        longest = -(-made.microbatches // made.pipeline_ranks) * sum(p.forward_ms for p in parts)
        assert filled.estimate.makespan_ms <= made.estimate.makespan_ms + longest + 1e-6


def test_small_instances_are_solved_exactly():
    """Every assignment of layers to gaps is tried: none ends earlier than the program's."""
    for seed in range(6):
        rng = random.Random(seed)
        costs = profile([layer(rng.uniform(0.5, 2), rng.uniform(1, 3)) for _ in range(4)])
        made = make_plan(
            Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2),
            SearchOptions(placement="wave", solver_seconds=0.0),
        )
        frozen = part("latents", rng.uniform(0.3, 2), rng.uniform(0.3, 2))
        problem = Problem(made, costs, cluster())
        gaps = gaps_of(simulate(made, costs, cluster()), 0.25)
        program = Assignment(problem, [frozen], {"latents": (0, 1)}, gaps, 1e3)
        runs = program.solve(10.0)
        assert runs is not None
        length = [0.0] * len(gaps)
        for rank, row in enumerate(runs):
            for filling in row:
                g = next(i for i, gap in enumerate(gaps) if (gap.rank, gap.position) == (rank, filling.position))
                length[g] += Fill(parts=(frozen,), rows=()).duration_ms(filling.work)
        assert _end(gaps, length) == pytest.approx(_least_end(gaps, frozen), abs=1e-6)


def _end(gaps, length):
    return max(gap.start_ms + used for gap, used in zip(gaps, length, strict=True) if gap.is_last)


def _least_end(gaps, frozen):
    ms = [x.forward_ms for x in frozen.layers]
    best = float("inf")
    for places in itertools.product(range(len(gaps)), repeat=4):
        length = [0.0] * len(gaps)
        for place, duration in zip(places, ms * 2, strict=True):
            length[place] += duration
        fits = all(used <= gap.end_ms - gap.start_ms + 1e-9 for gap, used in zip(gaps, length, strict=True))
        chains = (places[:2], places[2:])
        if fits and all(a == b or gaps[a].end_ms <= gaps[b].start_ms for a, b in chains):
            best = min(best, _end(gaps, length))
    return best


def filled_by_hand():
    """Two ranks, one stage each; rank 1 idles first and runs both microbatches' part then."""
    frozen = part("text", 0.5, 0.5, targets=(0,), size=1_000_000)
    fill = Fill(
        parts=(frozen,),
        rows=(
            (),
            (
                Filling(0, FrozenRun("text", 0, 2, 0)),
                Filling(0, HandOver("text", 2, 0, 0)),
                Filling(4, FrozenRun("text", 0, 2, 1)),
                Filling(4, HandOver("text", 2, 1, 0)),
            ),
        ),
    )
    return replace(plan((0, 1), 2, schedule=rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")), fill=fill)


@pytest.mark.parametrize(
    "order", [("0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1B1 1W0"), ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1B0 1B1")]
)
def test_whole_backwards_beside_halves(order):
    """What a half sends may be taken by a whole backward, and the other way round."""
    whole = uniform(2)
    costs = replace(whole, layers=tuple(replace(each, weight_grad_ms=each.backward_ms / 2) for each in whole.layers))
    made = plan((0, 1), 2, schedule=rows(*order))
    frozen = part("text", *[0.5] * 8)
    filled = fill_plan(made, Job.of(made, costs, cluster(), frozen=[frozen]), solver_seconds=0.0)
    assert filled.schedule == made.schedule
    assert not violations(filled, num_layers=2, values=costs.values)


def test_a_bound_counts_no_backward_as_longer_than_a_whole_one():
    """12 ms of whole actions and 8 of frozen work on two ranks; halves take 0.9 ms more each time."""
    costs = uniform(2, weight_grad_ms=1.0, input_grad_ms=1.9)
    made = plan((0, 1), 2, schedule=rows("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1W0 1I1 1W1"))
    job = Job.of(made, costs, cluster(), frozen=[part("text", *[0.5] * 8)])
    assert fill_plan(made, job, solver_seconds=0.0).estimate.lower_bound_ms == pytest.approx(10)


def test_frozen_work_takes_time_and_its_results_travel():
    made, costs = filled_by_hand(), uniform(2)
    slow = cluster(Link(bandwidth_gb_per_s=1.0, latency_us=500.0))
    timeline = simulate(made, costs, slow)
    spans = {str(span.work): (span.rank, span.start_ms, span.end_ms) for span in timeline.frozen}
    assert spans == {"text[0:2]@0": (1, 0.0, 1.0), "text[0:2]@1": (1, 7.5, 8.5)}
    carried = {str(c.message): (c.leave_ms, c.arrive_ms) for c in timeline.carried}
    assert carried == {"text[2]@0>0": (1.0, 2.5), "text[2]@1>0": (8.5, 10.0)}
    assert timeline.makespan_ms == pytest.approx(10.0)
    assert violations(made, num_layers=2, values=()) == []


def test_a_hand_over_keeps_its_ends_from_other_work():
    """0.5 ms: before it leaves, and before what reads it; a result that only the next step reads is there later."""
    busy = cluster(Link(bandwidth_gb_per_s=1.0, latency_us=500.0, overhead_us=500.0))
    made = filled_by_hand()
    begun = (Filling(0, FrozenRun("text", 0, 1, 0)), Filling(0, HandOver("text", 1, 0, 1)))
    rest = (Filling(0, FrozenRun("text", 1, 2, 0)), Filling(0, HandOver("text", 2, 0, 0)))
    filled = replace(made, fill=replace(made.fill, rows=(begun, (*rest, *made.fill.rows[1][2:]))))
    timeline = simulate(filled, uniform(2), busy)
    spans = {str(span.work): (span.start_ms, span.end_ms) for span in timeline.every_span}
    assert spans["0F0"][0] == 1.0 and spans["text[1:2]@0"] == (3.0, 3.5) and spans["1F0"][0] == 4.0
    carried = {str(c.message): (c.leave_ms, c.arrive_ms) for c in timeline.carried}
    assert carried["text[1]@0>1"] == (1.0, 2.5) and carried["text[2]@0>0"] == (4.0, 6.0)


def test_memory_counts_both_buffers():
    """Rank 0 reads 1 MB a microbatch: this step's until the backward, the next step's from when receives are posted.

    Rank 1 has both to the end: nothing tells it that rank 0 has taken them.
    """
    made = filled_by_hand()
    slow = cluster(Link(bandwidth_gb_per_s=1.0, latency_us=500.0))
    base = estimate(replace(made, fill=None), uniform(2), slow).peak_bytes
    timeline = simulate(made, uniform(2), slow)
    full = estimate(made, uniform(2), slow).peak_bytes
    assert full[0] == base[0] + 4_000_000
    held = [(round(time, 1), live // 1_000_000) for time, live in timeline.memory[1] if live >= 1_000_000]
    assert held[0] == (0.0, 2) and held[-2:] == [(7.5, 3), (8.5, 2)], "a layer at work needs 2 MB"


@pytest.mark.parametrize(("position", "held"), [(0, 2), (4, 3)])
def test_a_result_is_held_until_a_message_tells_that_it_is_there(position, held):
    """What rank 0 began, rank 1 takes before its first forward, so that a gradient tells, or after its last action.

    When 0B1 runs, rank 0 also has what that reads and a buffer for the other microbatch of the next step; 1 MB each.
    """
    made = filled_by_hand()
    begun = (Filling(0, FrozenRun("text", 0, 1, 0)), Filling(0, HandOver("text", 1, 0, 1)))
    rest = (Filling(4, FrozenRun("text", 0, 2, 1)),)
    taken = (Filling(position, FrozenRun("text", 1, 2, 0)), Filling(position, HandOver("text", 2, 0, 0)))
    filled = replace(made, fill=replace(made.fill, rows=((*begun, *rest), taken)))
    assert violations(filled, num_layers=2, values=()) == []
    timeline = simulate(filled, uniform(2), cluster())
    (last,) = (span for span in timeline.spans if str(span.work) == "0B1")
    assert [live // 1_000_000 for time, live in timeline.memory[0] if time <= last.start_ms + 1e-6][-1] == held


def test_memory_counts_a_result_until_the_layer_that_reads_it_has_run():
    """Layer 1 needs 2 MB to run; where layer 0 ran long before it, that one's result of 1 MB lies there beside."""
    made = filled_by_hand()
    _, (_, sent, other, other_sent) = made.fill.rows
    row = (
        *(replace(filling, position=0) for filling in (other, other_sent)),
        Filling(1, FrozenRun("text", 0, 1, 0)),
        Filling(4, FrozenRun("text", 1, 2, 0)),
        replace(sent, position=4),
    )
    later = replace(made, fill=replace(made.fill, rows=((), row)))
    assert violations(later, num_layers=2, values=()) == []
    peaks = [estimate(found, uniform(2), cluster()).peak_bytes[1] for found in (made, later)]
    assert peaks[1] == peaks[0] + 1_000_000


def test_a_part_that_nobody_reads_is_a_violation():
    made = filled_by_hand()
    (frozen,) = made.fill.parts
    read = replace(frozen, targets=())
    for parts, wrong in (((read,), True), ((read, part("more", 0.5, needs=("text",))), False)):
        found = violations(replace(made, fill=replace(made.fill, parts=parts)), num_layers=2, values=())
        assert ("fill: nobody reads part 'text': it has no targets and no part needs it" in found) is wrong


def test_of_many_layers_that_never_run_some_are_shown_and_the_rest_is_counted():
    made = filled_by_hand()
    long = part("text", *[0.5] * 6)
    wrong = replace(made, fill=Fill(parts=(long,), rows=((), (Filling(0, FrozenRun("text", 5, 6, 0)),))))
    found = violations(wrong, num_layers=2, values=())
    assert "fill: part 'text': never runs: layer [0]@0, [1]@0, [2]@0, [3]@0 and 7 more" in found
    few = replace(wrong, fill=replace(wrong.fill, parts=(part("text", 0.5, 0.5),), rows=((), ())))
    assert "fill: part 'text': never runs: layer [0]@0, [1]@0, [0]@1, [1]@1" in violations(few, num_layers=2, values=())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: row[1:], r"never runs: layer \[0\]@0, \[1\]@0"),
        (lambda row: (row[0], *row), r"runs more than once"),
        (lambda row: row[:3], "rank 0 reads part 'text' and never gets it for microbatch 1"),
        (lambda row: (row[1], row[0], *row[2:]), r"deadlock: rank 1 is stuck at text\[2\]@0>0"),
        (lambda row: (*row, Filling(4, HandOver("text", 2, 1, 0))), "made or sent there 2 times"),
        (lambda row: (*row, Filling(4, HandOver("text", 1, 0, 0))), r"rank 1: text.1.@0>0: nothing on rank 0 reads it"),
        (lambda row: (*row, Filling(9, FrozenRun("text", 0, 1, 0))), "position 9 is after the row's end 4"),
        (lambda row: (*row, Filling(4, FrozenRun("test", 0, 1, 0))), 'no such part .did you mean "text"'),
        (lambda row: (*row, Filling(4, FrozenRun("text", 0, 3, 0))), "expected layers first < end <= 2"),
        (lambda row: (*row, Filling(4, HandOver("text", 2, 0, 1))), "another of the 2 pipeline ranks"),
        (lambda row: (*row, Filling(4, HandOver("text", 2, 7, 0))), "no such microbatch"),
    ],
)
def test_what_is_wrong_with_a_fill_is_said(change, problem):
    made = filled_by_hand()
    wrong = replace(made, fill=replace(made.fill, rows=((), tuple(change(made.fill.rows[1])))))
    found = violations(wrong, num_layers=2, values=())
    assert any(re.search(problem, line) for line in found), found


def test_a_fill_that_waits_for_itself_is_a_deadlock():
    """Rank 0's action waits for rank 1's, which comes after frozen work that waits for rank 0's result."""
    made = filled_by_hand()
    rows_ = (
        (Filling(3, FrozenRun("text", 0, 1, 0)), Filling(3, HandOver("text", 1, 0, 1)), *_rest(1, at=4)),
        (Filling(2, FrozenRun("text", 1, 2, 0)), Filling(2, HandOver("text", 2, 0, 0))),
    )
    wrong = replace(made, fill=replace(made.fill, rows=rows_))
    assert any("deadlock" in line for line in violations(wrong, num_layers=2, values=()))


def _rest(m, *, at):
    return (Filling(at, FrozenRun("text", 0, 2, m)),)


def test_another_number_of_microbatches_is_filled_anew():
    costs = uniform(8)
    made = make_plan(
        Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2, frozen=[part("latents", 1, 1)]),
        SearchOptions(solver_seconds=0.0),
    )
    more = reorder(made, Job.of(made, costs, cluster(), microbatches=4), SearchOptions(solver_seconds=0.0))
    assert len({run.microbatch for rank in range(2) for run in more.fill.runs_of(rank)}) == 4
    assert violations(more, num_layers=8, values=()) == []


def test_parts_run_where_memory_and_their_ranks_allow():
    costs = uniform(8)
    made = make_plan(
        Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2),
        SearchOptions(placement="wave", solver_seconds=0.0),
    )
    only = fill_plan(
        made, Job.of(made, costs, cluster(), frozen=[part("latents", 1, 1, ranks=(1,))]), solver_seconds=0.0
    )
    assert [bool(only.fill.runs_of(rank)) for rank in range(2)] == [False, True]
    problem = Problem(made, costs, cluster())
    room = max(made.estimate.peak_bytes) + 1000
    with pytest.raises(InfeasibleError, match=r"needs 0\.000 GB on a rank"):
        allowed_ranks(problem, [part("latents", 1, params=2000)], made.estimate.peak_bytes, room)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([part("a", 1, targets=(9,))], "expected targets below the model's 8 layers, found 9"),
        ([part("a", 1, targets=())], "neither a layer of the model"),
        ([part("a", 1, ranks=(5,))], "expected pipeline ranks below 2, found 5"),
    ],
)
def test_parts_that_do_not_fit_the_model(parts, problem):
    costs = uniform(8)
    made = make_plan(
        Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2), SearchOptions(solver_seconds=0.0)
    )
    with pytest.raises(PlanError, match=problem):
        fill_plan(made, Job.of(made, costs, cluster(), frozen=parts), solver_seconds=0.0)


FROZEN = {
    "format": "pulse-frozen/1",
    "name": "encoders",
    "device": "none",
    "dtype": "bfloat16",
    "parts": [
        {
            "name": "latents",
            "targets": [0],
            "layers": [
                {
                    "name": "conv",
                    "forward_ms": {"1": 2.0, "4": 6.0},
                    "param_bytes": 10,
                    "output_bytes": 5,
                    "activation_bytes": 7,
                }
            ],
        }
    ],
}


def test_times_by_microbatch_size():
    found = FrozenParts.from_json(json.dumps(FROZEN))
    assert [found.at(size)[0].layers[0].forward_ms for size in (1, 2, 4, 8)] == [2.0, 4.0, 6.0, 12.0]
    assert found.at(4)[0].output_bytes == 20
    assert FrozenParts.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["parts"].append(d["parts"][0]), "each with a name of its own"),
        (lambda d: d["parts"][0].update(needs=["latents"]), "need each other's results"),
        (lambda d: d["parts"][0].update(needs=["text"]), "part 'latents' needs 'text'"),
        (lambda d: d["parts"][0].update(layers=[]), "at least one layer"),
        (lambda d: d["parts"][0].update(ranks=[]), "ranks that name at least one"),
        (lambda d: d["parts"][0]["layers"][0].update(forward_ms=1.0), "an object of ms by microbatch size"),
        (lambda d: d["parts"][0]["layers"][0].update(forward_ms={"0": 1}), "an object of ms by microbatch size"),
        (lambda d: d["parts"][0]["layers"][0]["forward_ms"].update({"1": -1}), "a finite number"),
        (lambda d: d.update(cost=1), "unknown field 'cost'"),
    ],
)
def test_files_of_frozen_parts_are_checked(change, problem):
    data = json.loads(json.dumps(FROZEN))
    change(data)
    with pytest.raises(FileError, match=problem):
        FrozenParts.from_json(json.dumps(data), "frozen.json")


def test_smaller_microbatches_than_timed_are_refused():
    data = json.loads(json.dumps(FROZEN))
    data["parts"][0]["layers"][0]["forward_ms"] = {"4": 1.0}
    with pytest.raises(FileError, match="2 or fewer samples, found sizes 4"):
        FrozenParts.from_json(json.dumps(data)).at(2)


@pytest.mark.parametrize("text", ["latents[0:5]@3", "latents[5]@3>2", "added.text_embeds[0:1]@0"])
def test_work_is_text(text):
    assert str(parse_work(text)) == text


@pytest.mark.parametrize("text", ["latents", "latents[5:]@3", "[0:5]@3", "latents[05:6]@3", "latents[5]@3"])
def test_other_text_is_refused(text):
    with pytest.raises(FileError, match="expected frozen work such as"):
        parse_work(text)


@pytest.mark.parametrize(
    ("fill", "problem"),
    [
        ({"parts": [], "rows": [[], []]}, "at least one part"),
        ({"parts": [{"name": "a", "layers": []}], "rows": [[], []]}, "at least one layer"),
        ({"rows": [[]]}, "field 'parts'"),
    ],
)
def test_a_damaged_fill_is_refused(fill, problem):
    data = filled_by_hand().to_dict()
    data["fill"] = fill
    with pytest.raises(FileError, match=problem):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "row", [3, [[1]], [[1, "x"]], [[True, "text[0:1]@0"]], [[2, "text[0:1]@0"], [1, "text[1:2]@0"]]]
)
def test_a_damaged_row_is_refused(row):
    data = filled_by_hand().to_dict()
    data["fill"]["rows"][1] = row
    with pytest.raises(FileError, match="rows"):
        Plan.from_json(json.dumps(data))


def test_planning_anew_within_less_memory_takes_no_longer_than_ranks_wait(monkeypatch):
    given, filled = [], ordering._filled

    def too_much_at_first(plan, job, memory_bytes, options, progress):
        given.append(options.solver_seconds)
        if len(given) == 1:
            raise InfeasibleError("too much", needed_bytes=job.limit_bytes + 1)
        return filled(plan, job, memory_bytes, replace(options, solver_seconds=0.0), progress)

    monkeypatch.setattr(ordering, "_filled", too_much_at_first)
    costs = uniform(8)
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2, frozen=[part("latents", 1)])
    made = make_plan(replace(job, frozen=()), SearchOptions(placement="wave", solver_seconds=0.0))
    assert ordering.ordered(made, job, SearchOptions(solver_seconds=300.0)).fill is not None
    # each takes up to 1.5 times what it is given: an order, and as long again for both kinds of filling
    assert 1.5 * sum(given) <= 600


def test_plans_without_frozen_work_are_written_as_before():
    assert "fill" not in plan((0, 1), 2, schedule=rows("0F0", "1F0")).to_dict()
    assert Placement.wave(2) == (0, 1, 1, 0)


def test_bytes_of_a_microbatch_are_the_mean_where_parts_run_on_several_ranks():
    costs = uniform(4)
    job = Job(profile=costs, cluster=cluster(), pipeline_ranks=2, microbatches=2)
    made = make_plan(job, SearchOptions(placement="linear", solver_seconds=0))
    text = FrozenPart(
        name="z",
        targets=(3,),
        layers=(FrozenLayer(name="0", forward_ms=1.0, param_bytes=1, output_bytes=1000, activation_bytes=1),),
    )

    def sent(here, there):
        """The microbatch ``here`` is encoded on the rank that does not read it."""
        filled = (
            (Filling(0, FrozenRun("z", 0, 1, here)), Filling(0, HandOver("z", 1, here, 1))),
            (Filling(0, FrozenRun("z", 0, 1, there)),),
        )
        plan = replace(made, fill=Fill(parts=(text,), rows=filled))
        assert not violations(plan, num_layers=4, values=())
        return estimate(plan, costs, cluster()).p2p_bytes_per_microbatch

    assert sent(1, 0) == sent(0, 1) == 500


@pytest.mark.parametrize("name", ["", "two\nlines"])
def test_a_part_has_a_name_of_one_line(name):
    parts = (FrozenPart(name=name, targets=(0,), layers=()),)
    with pytest.raises(FileError, match="names of one line, none of them empty"):
        check_parts(parts, Fields({"parts": []}, "frozen.json"))


def test_ranks_of_a_part_are_named_once():
    parts = (FrozenPart(name="z", targets=(0,), layers=(), ranks=(1, 1)),)
    with pytest.raises(FileError, match="ranks that name each once"):
        check_parts(parts, Fields({"parts": []}, "frozen.json"))
