"""Self-conditioning in one process: losses and gradients are those of one process that draws the same microbatches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.local_world import LocalWorld
from support.random_plans import random_order, random_plan
from support.reference import Unpartitioned, error
from support.selfcond import ENTRY, batch_of, conditioned_layers, estimate, loss_of

from deepspeed_pulse.engine.specs import graph_of
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.conditioning import SelfConditioned, data_order, drawn, placed
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.planner import forward_schedule, violations

PLACES = {
    "wave": Placement.wave,
    "linear": Placement.linear,
    "two waves": lambda ranks: Placement.wave(ranks, 2),
    "loop": lambda ranks: Placement.loop(ranks, 2),
}
READERS = {"first": (0,), "first and last": (0, 9), "inside": (4,), "last": (9,)}


def drawn_plan(layers: list[Any], seed: int, *, ranks: int, microbatches: int, place: str, readers: str) -> Plan:
    """Random cuts and order, half of the backwards in halves, a random half of the microbatches self-conditioned."""
    source, graph = random.Random(seed), graph_of(layers)
    plain = random_plan(graph, seed, ranks=ranks, microbatches=microbatches, placement=PLACES[place](ranks))
    one = SelfConditioned(entry=ENTRY, layers=READERS[readers], probability=0.5)
    priority = source.sample(range(microbatches), microbatches)
    plan = replace(plain, conditioning=placed([one], priority))
    return replace(plan, schedule=random_order(plan, source, False, 0.5))


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_one_process(seed: int, place: str, readers: str) -> None:
    layers = conditioned_layers(READERS[readers])
    ranks = {"two waves": 2, "loop": 3}.get(place, 4 - seed)
    plan = drawn_plan(layers, seed, ranks=ranks, microbatches=5, place=place, readers=readers)
    assert violations(plan, num_layers=len(layers), values=graph_of(layers).values) == []
    mine, alone = Unpartitioned(layers), Unpartitioned(conditioned_layers(READERS[readers]))
    batches = [batch_of(seed, m) for m in range(5)]
    world = LocalWorld(
        plan,
        graph_of(layers),
        mine.functions,
        lambda output, m: loss_of(output, batches[m][1]),
        estimate=lambda output, m, backbone: estimate(output, batches[m][0]),
    )
    for step in range(2):
        mine.zero_grad()
        alone.zero_grad()
        order = drawn(7, step, 5)
        world.step([(b[0]["hidden"], b[0]) for b in batches], order=data_order(plan.conditioning, order))
        for m, (inputs, labels) in enumerate(batches):
            value = torch.zeros_like(inputs["hidden"])
            if m in order[:2]:
                with torch.no_grad():
                    value = estimate(alone({**inputs, ENTRY: value}), inputs)
            loss = loss_of(alone({**inputs, ENTRY: value}), labels) / 5
            loss.backward()
            assert float(world.losses[m]) / 5 == pytest.approx(float(loss.detach()), rel=1e-5), (m, order)
        for (name, expected), found in zip(alone.named_parameters(), mine.parameters(), strict=True):
            assert error(found.grad, expected.grad) < 1e-5, name


def test_shapes_may_change_from_one_microbatch_to_the_next() -> None:
    layers = conditioned_layers((0, 9))
    plan = drawn_plan(layers, 1, ranks=3, microbatches=5, place="linear", readers="first and last")
    mine, alone = Unpartitioned(layers), Unpartitioned(layers)
    batches = [batch_of(1, m, size=1 + m % 3) for m in range(5)]
    world = LocalWorld(
        plan,
        graph_of(layers),
        mine.functions,
        lambda output, m: loss_of(output, batches[m][1]),
        estimate=lambda output, m, backbone: estimate(output, batches[m][0]),
    )
    for step in range(3):
        order = drawn(7, step, 5)
        given = [(b[0]["hidden"], b[0]) for b in batches]
        world.step(given, order=data_order(plan.conditioning, order), shape_keys=[m % 3 for m in range(5)])
        for m, (inputs, labels) in enumerate(batches):
            value = torch.zeros_like(inputs["hidden"])
            with torch.no_grad():
                if m in order[:2]:
                    value = estimate(alone({**inputs, ENTRY: value}), inputs)
                loss = loss_of(alone({**inputs, ENTRY: value}), labels)
            assert float(world.losses[m]) == pytest.approx(float(loss), rel=1e-5), (m, order)


def test_evaluation_runs_extra_forwards_too() -> None:
    layers = conditioned_layers((0,))
    plan = drawn_plan(layers, 3, ranks=2, microbatches=4, place="linear", readers="first")
    plan = replace(plan, schedule=forward_schedule(plan, 4))
    model, batches = Unpartitioned(layers), [batch_of(3, m) for m in range(4)]
    world = LocalWorld(
        plan,
        graph_of(layers),
        model.functions,
        lambda output, m: loss_of(output, batches[m][1]),
        estimate=lambda output, m, backbone: estimate(output, batches[m][0]),
    )
    with torch.no_grad():
        world.step([(b[0]["hidden"], b[0]) for b in batches], training=False)
        for m, (inputs, labels) in enumerate(batches):
            value = torch.zeros_like(inputs["hidden"])
            if m in plan.conditioning[0].microbatches:
                value = estimate(model({**inputs, ENTRY: value}), inputs)
            assert float(world.losses[m]) == pytest.approx(float(loss_of(model({**inputs, ENTRY: value}), labels)))


@pytest.mark.parametrize(
    ("given", "told"),
    [(lambda output: output[:1], "found [1, 8]"), (lambda output: None, "found NoneType")],
)
def test_an_estimate_of_another_form_is_refused(given: Any, told: str) -> None:
    layers = conditioned_layers((0,))
    plan = drawn_plan(layers, 3, ranks=1, microbatches=2, place="linear", readers="first")
    batches = [batch_of(3, m) for m in range(2)]
    world = LocalWorld(
        plan,
        graph_of(layers),
        Unpartitioned(layers).functions,
        lambda output, m: output.mean(),
        estimate=lambda output, m, backbone: given(output),
    )
    with pytest.raises(BatchError, match="self_conditioning: expected") as caught:
        world.step([(b[0]["hidden"], b[0]) for b in batches])
    assert told in str(caught.value)


def test_what_is_drawn_depends_on_the_seed_and_the_step_alone() -> None:
    assert drawn(1, 2, 8) == drawn(1, 2, 8) != drawn(1, 3, 8)
    assert sorted(drawn(1, 2, 8)) == list(range(8))
    counts = [sum(m in drawn(5, step, 4)[:2] for step in range(400)) for m in range(4)]
    assert all(160 < count < 240 for count in counts), counts


def test_two_backbones_draw_as_each_alone() -> None:
    """The data at a backbone's places are the first that were drawn, however many another has."""
    order = drawn(3, 1, 6)
    one = SelfConditioned(entry="a", layers=(0,), probability=0.5)
    both = placed([one, replace(one, entry="b", probability=0.9)], (5, 1, 3, 0, 2, 4))
    data = data_order(both, order)
    assert sorted(data) == list(range(6))
    assert {data[m] for m in both[0].microbatches} == set(order[:3])
    assert {data[m] for m in both[1].microbatches} == set(order[:5])
