"""What a rank counts is what the plan counted, where messages are most of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.local_world import LocalWorld
from support.random_plans import random_plan

from deepspeed_pulse.engine.measure.counter import count_layers
from deepspeed_pulse.engine.plans.costs import skips_of
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import LayerCost, Profile
from deepspeed_pulse.ir.schedule import Action
from deepspeed_pulse.planner import simulate
from deepspeed_pulse.planner.cost import default_cluster

HALF = 3
GRAPH = Graph(
    layers=tuple(
        Layer(
            name=str(i), stash=(f"skip{i}",) if i < HALF else (), pop=() if i < HALF else (f"skip{2 * HALF - 1 - i}",)
        )
        for i in range(2 * HALF)
    )
)
"""Nested skips, each also the hidden state of its layer."""
SHAPE = (4, 16)
VALUE = 4 * 4 * 16
"""Bytes of a hidden state, or of a skip."""


def functions(device: str) -> list[Callable]:
    """They keep nothing for backward but what they stash."""

    def layer(i: int) -> Callable:
        weight = torch.nn.Parameter(torch.zeros(SHAPE[1], device=device))
        return (lambda x: ((y := x + weight), y)) if i < HALF else (lambda x, skip: x + weight + skip)

    return [layer(i) for i in range(2 * HALF)]


def profile() -> Profile:
    made = functions("meta")
    counted = count_layers(GRAPH, [lambda one=one: one for one in made], torch.empty(SHAPE, device="meta"), {})
    assert [layer.unkept_output_bytes for layer in counted.layers] == [0] * HALF + [VALUE] * HALF
    return Profile(
        name="toy",
        device="estimated",
        dtype="float32",
        microbatch_size=SHAPE[0],
        layers=tuple(
            LayerCost(
                name=layer.name,
                forward_ms=1.0,
                backward_ms=2.0,
                param_bytes=0,
                activation_bytes=layer.activation_bytes,
                output_bytes=layer.output_bytes,
                unkept_output_bytes=layer.unkept_output_bytes,
            )
            for layer in counted.layers
        ),
        skips=skips_of(GRAPH, counted.value_bytes),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_rank_counts_what_was_planned(seed: int) -> None:
    """But for a value that came from another rank: it is there beside its gradient when a backward ends."""
    ranks, microbatches = 2 * HALF, 4
    plan = random_plan(GRAPH, seed, ranks=ranks, microbatches=microbatches, placement=range(ranks))
    world = LocalWorld(plan, GRAPH, functions("cpu"), lambda output, m: output.mean())
    batches = [(torch.ones(SHAPE), {})] * microbatches
    world.step(batches)  # the second step finds every boundary agreed on
    counted = [stats.peak_live_bytes for stats in world.step(batches)]
    memory = simulate(plan, profile(), default_cluster(ranks, 10**9)).memory
    beyond = [found - max(size for _, size in curve) for found, curve in zip(counted, memory, strict=True)]
    assert set(beyond) <= {0, VALUE}, counted


def test_a_hidden_state_that_stays_counts_until_its_reader_starts() -> None:
    """Both stages are on one rank and keep nothing: while 0F2 runs, those of two microbatches wait."""
    graph = Graph(layers=tuple(Layer(name=str(i)) for i in range(2)))
    order = "0F0 0F1 0F2 1F0 1F1 1F2 1B0 0B0 1B1 0B1 1B2 0B2"
    plan = Plan(
        pipeline_ranks=1,
        data_parallel=1,
        microbatches=3,
        microbatch_size=SHAPE[0],
        boundaries=(0, 1, 2),
        placement=(0, 0),
        schedule=(tuple(map(Action.parse, order.split())),),
    )
    made = [torch.nn.Parameter(torch.zeros(SHAPE[1])) for _ in range(2)]
    layers = [lambda x, weight=weight: x + weight for weight in made]
    world = LocalWorld(plan, graph, layers, lambda output, m: output.mean())
    (stats,) = world.step([(torch.ones(SHAPE), {})] * 3)
    cost = replace(profile().layers[-1], activation_bytes=0)
    (curve,) = simulate(plan, replace(profile(), layers=(cost, cost), skips=()), default_cluster(1, 10**9)).memory
    assert stats.peak_live_bytes == max(size for _, size in curve) == 2 * VALUE
    assert stats.peak_parts["received"] == 2 * VALUE
