"""Frozen parts on one rank: order, memory that is given back, and results of one shape."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.local_world import LocalDevice, Mailboxes

from deepspeed_pulse.errors import BatchError, GraphError
from deepspeed_pulse.ir.channels import known_hand_overs
from deepspeed_pulse.ir.dependencies import walk
from deepspeed_pulse.ir.fill import Fill, Filling, FrozenLayer, FrozenPart, FrozenRun, HandOver, parse_work
from deepspeed_pulse.ir.graph import Layer
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.ir.program import Step, lower
from deepspeed_pulse.ir.schedule import Action, Op
from deepspeed_pulse.planner import simulate, violations
from deepspeed_pulse.planner.cost import default_cluster
from deepspeed_pulse.runtime.frozen import FrozenLayers, FrozenRuntime


def runtime(*functions, rank=0, reads=("text",), mail=None):
    layers = tuple((Layer(name=str(i)), function) for i, function in enumerate(functions))
    part = FrozenLayers(name="text", input="ids", layers=layers, dtype=torch.float64)
    return FrozenRuntime(
        rank=rank,
        parts={"text": part},
        reads=reads,
        communicator=mail,  # one rank sends nothing
        device=LocalDevice(microbatches=2),
        timeout_seconds=1.0,
    )


def fill_of(*runs):
    costs = FrozenLayer(name="", forward_ms=1.0, param_bytes=0, output_bytes=1, activation_bytes=1)
    part = FrozenPart(name="text", layers=(costs, costs), targets=(0,))
    return Fill(parts=(part,), rows=(tuple(Filling(at, FrozenRun("text", *run)) for at, run in runs),))


def test_layers_run_where_the_fill_puts_them_without_gradient_in_their_own_dtype():
    seen = []
    frozen = runtime(lambda x: seen.append("first") or x + 1, lambda x: seen.append("second") or 2 * x)
    ids = torch.ones(2, requires_grad=True)
    fill = fill_of((0, (0, 1, 0)), (1, (1, 2, 0)), (1, (0, 2, 1)))
    frozen.begin(fill, lambda name, m: ids * m, microbatches=2, mode="train")
    frozen.run(0)
    assert seen == ["first"]
    frozen.run(1)
    found = frozen.finish()
    assert seen == ["first", "second", "first", "second"]
    assert {key: value.tolist() for key, value in found.items()} == {("text", 0): [2, 2], ("text", 1): [4, 4]}
    assert found["text", 0].dtype is torch.float64 and not found["text", 0].requires_grad
    assert [str(span.work) for span in frozen.stopwatch.spans] == ["text[0:1]@0", "text[1:2]@0", "text[0:2]@1"]
    assert not frozen._held


def test_what_was_handed_over_is_dropped_when_its_peer_has_it_and_what_is_read_here_stays():
    frozen, sent, released, counted = runtime(lambda x: x + 1, lambda x: 2 * x), [], [], []
    frozen._transport = SimpleNamespace(
        begin=lambda *a: None,
        send=lambda message, value: sent.append(message.name),
        release=lambda messages: released.extend(message.name for message in messages),
        drain=lambda: None,
        sent_bytes={},
        buffer_bytes=100,
    )
    runs = [
        FrozenRun("text", 0, 1, 0),
        HandOver("text", 1, 0, 1),
        FrozenRun("text", 0, 2, 1),
        HandOver("text", 2, 1, 1),
    ]
    fill = replace(fill_of(), rows=(tuple(Filling(0, work) for work in runs), ()))
    known = {runs[2]: [runs[1]], 1: [runs[3]]}
    count = lambda *given: counted.append(given)  # noqa: E731
    frozen.begin(fill, lambda name, m: torch.ones(2), microbatches=2, mode="train", known=known, count=count)
    frozen.run(0)
    assert counted == [(100, 1), (16, 0), (0, 1), (16, 0), (-16, 0)], "buffers once, then two numbers of eight bytes"
    assert sent == ["text[1]", "text[2]"] and released == ["text[1]"]
    frozen.run(1)
    assert released == ["text[1]", "text[2]"]
    assert [str(result) for result in frozen._held] == ["text[2]@1 on rank 0"]
    assert [*frozen.finish()] == [("text", 1)] and not frozen._held


LAYERS = (lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x + 1]).mul_(2), lambda x: x[:2] + 1)
SIZES = (32, 64, 16)
"""Bytes of what each gives for two numbers."""

BUSY = 100
"""Bytes that a layer at work needs."""


def relayed() -> Plan:
    """Three ranks; what rank 0 begins reaches rank 2 by way of rank 1, which does not read it, and so does the result
    on its way back."""
    fillings = (
        "0 text[0:1]@0, 0 text[1]@0>1, 2 text[2:3]@1, 2 text[3]@1>2",
        "0 text[0:2]@1, 0 text[2]@1>0, 0 text[1]@0>2, 4 text[3]@0>0",
        "0 text[1:3]@0, 0 text[3]@0>1",
    )
    costs = [
        FrozenLayer(name="", forward_ms=0.1, param_bytes=0, output_bytes=size, activation_bytes=BUSY) for size in SIZES
    ]
    rows = [[each.split() for each in row.split(", ")] for row in fillings]
    fill = Fill(
        parts=(FrozenPart(name="text", layers=tuple(costs), targets=(0, 2)),),
        rows=tuple(tuple(Filling(int(at), parse_work(work)) for at, work in row) for row in rows),
    )
    order = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")
    return Plan(
        pipeline_ranks=3,
        data_parallel=1,
        microbatches=2,
        microbatch_size=1,
        boundaries=(0, 1, 2, 3),
        placement=(0, 1, 2),
        schedule=tuple(tuple(map(Action.parse, row.split())) for row in order),
        fill=fill,
    )


def test_a_rank_knows_of_hand_overs_that_are_over_by_what_comes_back():
    plan = relayed()
    found = [{k: [*map(str, works)] for k, works in of.items()} for of in known_hand_overs(lower(plan), plan.fill)]
    assert found == [{3: ["text[1]@0>1"]}, {3: ["text[1]@0>2"]}, {}], "by a gradient; of the others nothing tells"


def test_ranks_hand_on_what_they_do_not_read_and_hold_what_was_planned():
    plan, mail = relayed(), Mailboxes()
    assert not violations(plan, num_layers=3, values=())
    readers = plan.readers_of(plan.fill.parts[0])
    ranks = [runtime(*LAYERS, rank=rank, reads=["text"] if rank in readers else [], mail=mail) for rank in range(3)]
    for number in range(2):  # in the second step receives are posted ahead
        ids = [torch.tensor([m, number], dtype=torch.float64) for m in range(2)]
        found, held, peaks = encoded_in_a_step(plan, ranks, ids)
        expected = {("text", m): LAYERS[2](LAYERS[1](LAYERS[0](ids[m]))) for m in range(2)}
        for rank, results in enumerate(found):
            assert results.keys() == (expected.keys() if rank in readers else set())
            assert all(torch.equal(result, expected[key]) for key, result in results.items()), rank
        assert held == [2 * SIZES[-1], 0, 2 * SIZES[-1]], "the next step's"
    costs = LayerCost(name="", forward_ms=1.0, backward_ms=2.0, param_bytes=0, activation_bytes=0, output_bytes=0)
    profile = Profile(name="toy", device="none", dtype="float32", microbatch_size=1, layers=(costs,) * 3)
    memory = simulate(plan, profile, default_cluster(3, 10**9)).memory
    assert peaks == [max(size for _, size in curve) for curve in memory]


def encoded_in_a_step(plan, ranks, ids):
    """What ranks read of the next step, what they hold in the end and at most, where no action does anything."""
    program = lower(plan)
    known = known_hand_overs(program, plan.fill)
    readers = plan.readers_of(plan.fill.parts[0])
    held = [plan.microbatches * SIZES[-1] if rank in readers else 0 for rank in range(len(ranks))]
    peaks, at, reached = [*held], [0] * len(ranks), [-1] * len(ranks)

    def count(rank, change, workspace=0):
        held[rank] += change
        peaks[rank] = max(peaks[rank], held[rank] + workspace)

    def go_on(rank):
        if reached[rank] < at[rank]:
            reached[rank] = at[rank]
            ranks[rank].run(at[rank])

    for rank, each in enumerate(ranks):
        each.begin(
            plan.fill,
            lambda name, m: ids[m],
            microbatches=plan.microbatches,
            mode="train",
            known=known[rank],
            count=partial(count, rank),
        )
        each.count_posted()
    for rank, item in walk(program, plan.placement, plan.fill)[0]:
        go_on(rank)
        if isinstance(item, Step):
            at[rank] += 1
            if item.action.op is Op.BACKWARD and rank in readers:
                count(rank, -SIZES[-1])
    for rank in range(len(ranks)):
        go_on(rank)
    return [each.finish() for each in ranks], held, peaks


def test_an_encoder_whose_output_changes_its_shape_is_named():
    frozen = runtime(lambda x: x, lambda x: x)
    frozen.begin(
        fill_of((0, (0, 2, 0)), (0, (0, 2, 1))), lambda name, m: torch.ones(2 + m), microbatches=2, mode="train"
    )
    with pytest.raises(BatchError, match=r"frozen part 'text': expected .*2.* as for the first microbatch, found .*3"):
        frozen.run(0)


def test_an_error_names_the_layer():
    frozen = runtime(lambda x: x, lambda x: x @ x.new_ones(5))
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: torch.ones(2), microbatches=1, mode="train")
    with pytest.raises(RuntimeError, match=r"(?s)tensor size.*\nin layer 1"):
        frozen.run(0)


def test_what_layers_of_an_encoder_hand_on_are_tensors_wherever_a_plan_cuts():
    frozen = runtime(lambda x: {"hidden": x}, lambda x: x["hidden"])
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: torch.ones(2), microbatches=1, mode="train")
    with pytest.raises(GraphError, match=r"layer 0 of frozen part 'text' returned: expected a tensor .* of type dict"):
        frozen.run(0)


def test_an_encoder_in_inference_mode_gives_what_may_be_kept_for_backward():
    frozen = runtime(torch.inference_mode()(lambda x: x * 2), torch.inference_mode()(lambda x: x + 1))
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: torch.ones(2), microbatches=1, mode="train")
    frozen.run(0)
    weight = torch.ones(2, requires_grad=True)
    (weight * frozen.finish()["text", 0]).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3, 3]


def test_an_encoder_that_changes_its_input_in_place_leaves_the_data_alone():
    frozen = runtime(lambda x: x.mul_(3), lambda x: x + 1)
    ids = torch.ones(2, dtype=torch.float64)
    frozen.begin(fill_of((0, (0, 2, 0))), lambda name, m: ids, microbatches=1, mode="train")
    frozen.run(0)
    assert frozen.finish()["text", 0].tolist() == [4, 4] and ids.tolist() == [1, 1]
