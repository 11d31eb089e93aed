"""Several backbones in one plan, in one process: losses and gradients are those of each backbone alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.local_world import LocalWorld
from support.random_plans import random_order
from support.reference import Unpartitioned, error
from support.toy import loss_fn, toy_batch, toy_layers

from deepspeed_pulse.engine.backbones import Backbone, heads_of, joint_graph, own_ties
from deepspeed_pulse.ir.backbones import BackboneStages
from deepspeed_pulse.ir.carried import carried_actions, with_carried
from deepspeed_pulse.ir.dependencies import walk
from deepspeed_pulse.ir.keys import key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan, make_routes
from deepspeed_pulse.ir.program import Step, lower
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.planner import forward_schedule, violations

NAMES = ("base", "middle", "upscaler")


def joint(count: int) -> tuple[list[Any], Any]:
    """The layers of so many toys, and their graph."""
    backbones = {name: Backbone(toy_layers(), loss_fn=loss_fn) for name in NAMES[:count]}
    lists = [own_ties(name, one.layers) for name, one in backbones.items()]
    layers = [layer for one in lists for layer in one]
    return layers, joint_graph(layers, heads_of(backbones, lists))


def drawn_plan(graph: Any, seed: int, *, ranks: int, microbatches: int) -> Plan:
    """Each backbone cut and directed by chance, all in a random order, some backwards in halves."""
    source, cuts, parts = random.Random(seed), list[int](), list[Placement]()
    for layers in graph.backbones:
        place = source.choice([Placement.wave(ranks), Placement.linear(ranks), Placement.loop(ranks, 2)])
        parts.append(place.mirrored if source.random() < 0.5 else place)
        cuts += [layers.start, *sorted(source.sample(range(layers.start + 1, layers.stop), len(place) - 1))]
    placement = Placement.of_backbones(parts)
    bounds = (*cuts, len(graph.layers))
    plan = Plan(
        pipeline_ranks=ranks,
        data_parallel=1,
        microbatches=microbatches,
        microbatch_size=2,
        boundaries=bounds,
        placement=placement,
        backbones=tuple(
            BackboneStages(name=name, stages=(stages.start, stages.stop))
            for name, stages in zip(NAMES, placement.backbones, strict=False)
        ),
        schedule=((),) * ranks,
        routes=make_routes(bounds, placement, graph.values),
    )
    return Plan(**{**vars(plan), "schedule": random_order(plan, source, False, source.choice([0.0, 0.5]))})


def batches_of(plan: Plan) -> list[list[tuple[dict[str, Any], torch.Tensor]]]:
    """Per microbatch, each backbone's own inputs and labels."""
    return [[toy_batch(k, m, 0) for k in range(len(plan.backbones))] for m in range(plan.microbatches)]


def given(batches: list[list[tuple[dict[str, Any], torch.Tensor]]]) -> list[tuple[list[Any], dict[str, Any]]]:
    """The same as the runtime takes them."""
    found = []
    for parts in batches:
        named = zip(NAMES, parts, strict=False)
        entries = {f"{name}.{key}": value for name, (inputs, _) in named for key, value in inputs.items()}
        found.append(([inputs["hidden"] for inputs, _ in parts], entries))
    return found


@pytest.mark.parametrize("seed", range(24))
def test_gradients_equal_each_backbone_alone(seed: int) -> None:
    count = 2 + seed % 2
    layers, graph = joint(count)
    plan = drawn_plan(graph, seed, ranks=1 + seed % 4, microbatches=1 + seed % 3)
    assert not violations(plan, num_layers=len(layers), values=graph.values)
    mine, batches = Unpartitioned(layers), batches_of(plan)
    losses = [lambda output, m, k=k: loss_fn(output, batches[m][k][1]) for k in range(count)]
    world = LocalWorld(plan, graph, mine.functions, losses)
    for _ in range(2):
        mine.zero_grad()
        world.step(given(batches))
    total = 0.0
    for k, part in enumerate(graph.backbones):
        alone = Unpartitioned(toy_layers())
        for own, index in zip(alone.by_layer.values(), [part.start + i for i in alone.by_layer], strict=True):
            own.load_state_dict(mine.by_layer[index].state_dict())
        for m in range(plan.microbatches):
            inputs, labels = batches[m][k]
            loss = loss_fn(alone(inputs), labels) / plan.microbatches
            total += float(loss.detach())
            loss.backward()
        for index, own in alone.by_layer.items():
            for (name, expected), found in zip(
                own.named_parameters(), mine.by_layer[part.start + index].parameters(), strict=True
            ):
                assert error(found.grad, expected.grad) < 1e-5, (k, index, name)
    assert sum(map(float, world.losses.values())) / plan.microbatches == pytest.approx(total, rel=1e-5)


def test_evaluation_runs_forwards_of_all() -> None:
    layers, graph = joint(2)
    plan = drawn_plan(graph, 7, ranks=3, microbatches=4)
    plan = Plan(**{**vars(plan), "schedule": forward_schedule(plan, 4)})
    mine, batches = Unpartitioned(layers), batches_of(plan)
    world = LocalWorld(
        plan, graph, mine.functions, [lambda output, m, k=k: loss_fn(output, batches[m][k][1]) for k in range(2)]
    )
    with torch.no_grad():
        world.step(given(batches), training=False)
    assert len(world.losses) == 4


def test_nothing_passes_between_backbones() -> None:
    _, graph = joint(3)
    placement = Placement.of_backbones([Placement.wave(3), Placement.wave(3).mirrored, Placement.linear(3)])
    assert placement.name == "wave + reversed wave + linear"
    assert placement.starts == (0, 6, 12) and [placement.before(s) for s in placement.starts] == [None] * 3
    assert all(placement.backbone_of(a) == placement.backbone_of(b) for a, b in placement.hidden_edges)
    owner = [index for index, part in enumerate(graph.backbones) for _ in part]
    assert all(owner[v.source] == owner[t] for v in graph.values for t in v.targets)


def test_a_plan_of_several_backbones_is_read_as_it_was_written() -> None:
    _, graph = joint(2)
    plan = drawn_plan(graph, 3, ranks=2, microbatches=2)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.placement.starts == plan.placement.starts
    assert [again.backbone_name(stages[0]) for stages in plan.placement.backbones] == ["base", "middle"]


def rolled(plan: Plan, seed: int) -> Plan:
    """The plan with steps that run into one another: some backbones cut by chance, everything in a random order."""
    source = random.Random(seed)
    one = source.randrange(len(plan.backbones))
    steps = {item.action: item for _, item in walk(lower(plan), plan.placement)[0] if isinstance(item, Step)}
    owner = {action: plan.placement.backbone_of(action.stage) for action in steps}
    late: set[Action] = set()
    for k in {*range(len(plan.backbones))} - {one}:
        own = [action for action in steps if owner[action] == k]
        late |= set(own[source.randrange(len(own) // 3, len(own)) :])
    needed = {
        action: [other for other in steps if key_of(other) in step.needs and (other in late) == (action in late)]
        for action, step in steps.items()
    }
    for action in steps:
        if owner[action] != one and action not in late:
            needed[action] += [other for other in late if owner[other] == owner[action]]
        needed[action] += [
            other
            for other in steps
            if (other.stage, other.op, other in late) == (action.stage, action.op, action in late)
            and other.microbatch < action.microbatch
        ]
    rows: list[list[Action]] = [[] for _ in plan.schedule]
    done: set[Action] = set()
    while len(done) < len(steps):
        action = source.choice([a for a in steps if a not in done and done.issuperset(needed[a])])
        rows[plan.placement[action.stage]].append(action)
        done.add(action)
    return with_carried(replace(plan, schedule=tuple(map(tuple, rows))), late)


@pytest.mark.parametrize("seed", range(24))
def test_steps_of_their_own_train_each_backbone_as_if_alone(seed: int) -> None:
    """Five steps that run into one another, other data in each, weights changed as each backbone ends its step."""
    count, steps = 2 + seed % 2, 5
    layers, graph = joint(count)
    plan = drawn_plan(graph, seed, ranks=1 + seed % 4, microbatches=1 + seed % 3)
    plan = rolled(plan, seed)
    assert carried_actions(plan) and not violations(plan, num_layers=len(layers), values=graph.values)
    mine = Unpartitioned(layers)
    weights = {index: own.state_dict() for index, own in mine.by_layer.items()}
    weights = {index: {name: value.clone() for name, value in own.items()} for index, own in weights.items()}
    data = [
        [[toy_batch(k, m + 10 * step, 0) for k in range(count)] for m in range(plan.microbatches)]
        for step in range(steps)
    ]
    found: dict[tuple[int, int], list[float]] = {}

    def loss_of(output: Any, m: int, k: int) -> torch.Tensor:
        loss = loss_fn(output, data[world.number - 1][m][k][1])
        found.setdefault((world.number, k), []).append(float(loss.detach()))
        return loss

    def update(backbone: int) -> None:
        descend([layer for index, layer in mine.by_layer.items() if index in graph.backbones[backbone]])

    losses = [lambda output, m, k=k: loss_of(output, m, k) for k in range(count)]
    world = LocalWorld(plan, graph, mine.functions, losses, update=update)
    for step in range(steps):
        world.step(given(data[step]))
    world.end_last()
    for k, part in enumerate(graph.backbones):
        alone = Unpartitioned(toy_layers())
        for index, own in alone.by_layer.items():
            own.load_state_dict(weights[part.start + index])
        for step in range(steps):
            values = []
            for m in range(plan.microbatches):
                inputs, labels = data[step][m][k]
                loss = loss_fn(alone(inputs), labels)
                values.append(float(loss.detach()))
                (loss / plan.microbatches).backward()
            assert sum(found[step + 1, k]) == pytest.approx(sum(values), rel=1e-5), (step, k)
            descend(list(alone.by_layer.values()))
        for index, own in alone.by_layer.items():
            for name, value in own.named_parameters():
                assert error(mine.by_layer[part.start + index].get_parameter(name), value) < 1e-5, (k, index, name)


def descend(layers: list[Any]) -> None:
    """A step of gradient descent, after which gradients are gone."""
    with torch.no_grad():
        for parameter in {p for layer in layers for p in layer.parameters()}:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
