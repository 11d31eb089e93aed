"""Transparency: loss, every gradient and the weights equal the unpartitioned model's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import launch_each
from support.parity import models
from support.random_plans import peak_forwards, random_plan

from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.placement import Placement

LAYOUTS = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(3, 1)], 4: [(2, 2), (4, 1)]}
"""World size to (pipeline ranks, data parallel)."""


def toy_cases(world: int) -> list[dict[str, Any]]:
    """The whole product on the toy network; two waves where ten layers allow."""
    cases = []
    for (ranks, _), microbatches, clip in itertools.product(LAYOUTS[world], (1, 2, 3, 8), (0.0, 0.1)):
        case = {"model": "toy", "P": ranks, "M": microbatches, "clip": clip}
        cases += [{**case, "enabled": True, "W": waves} for waves in (1, 2) if 2 * ranks * waves <= 10]
        cases.append({**case, "enabled": False})
    linear = {"model": "toy", "P": LAYOUTS[world][-1][0], "M": 3, "clip": 0.1, "enabled": True, "placement": "linear"}
    silent = {"model": "toy", "P": LAYOUTS[world][-1][0], "M": 3, "clip": 0.1, "enabled": True, "first_rank_only": True}
    untagged = {**silent, "untagged": True}
    cases += [linear, silent, untagged, {**linear, "first_rank_only": True}]
    cases += [{**linear, "autocast": True, **more} for more in ({}, {"interval": 1}, {"placement": "wave"})]
    if world == 4:
        two = {"model": "toy", "P": 2, "M": 3, "clip": 0.1, "enabled": True}
        cases += [{**two, "topology": {"data": 2, "pipe": 2}}, {**two, "topology": {"pipe": 2, "data": 2, "model": 1}}]
        cases += ordered_cases()
    return cases


def ordered_cases() -> list[dict[str, Any]]:
    """Weights in channels_last, transposed and with gaps, shared and tied over ranks, with replicas and without."""
    two = {"model": "ordered", "P": 2, "M": 3, "clip": 0.1, "enabled": True}
    linear = {**two, "P": 4, "placement": "linear"}
    return [
        two,
        linear,
        {**linear, "pulse": {"split_backward": True}},
        {**two, "interval": 2},
        {**two, "enabled": False},
    ]


def some_toy_cases(world: int) -> list[dict[str, Any]]:
    """Every layout with every number of microbatches, clipped where that is odd."""
    return [case for case in toy_cases(world) if (case["clip"] > 0) == (case["M"] % 2 == 1)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", (1, 4))
def test_toy_network_trains_as_if_unpartitioned(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.parity:run_cases", world, some_toy_cases(world), timeout=800)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", LAYOUTS)
def test_the_whole_product_of_the_toy_network(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.parity:run_cases", world, toy_cases(world), timeout=800)


UNET_PAIRS = [
    # P, M, W, clip, enabled: the toy network has the whole product here, this one in `make soak`.
    (1, 1, 1, 0.1, True),
    (1, 3, 2, 0.0, True),
    (1, 2, 1, 0.1, False),
    (2, 1, 2, 0.1, True),
    (2, 2, 1, 0.0, True),
    (2, 3, 2, 0.1, True),
    (3, 1, 1, 0.0, True),
    (3, 3, 2, 0.1, True),
    (3, 2, 1, 0.1, False),
    (4, 1, 1, 0.1, False),
    (4, 2, 2, 0.0, True),
    (4, 3, 1, 0.1, True),
]


def unet_cases(world: int) -> list[dict[str, Any]]:
    """All rows on as many ranks as stages take; of a pipeline with a replica, those of three microbatches."""
    keys = ("P", "M", "W", "clip", "enabled")
    cases = [{"model": "unet", **dict(zip(keys, row, strict=True))} for row in UNET_PAIRS]
    replicated = [ranks for ranks, replicas in LAYOUTS[world] if replicas > 1]
    return [case for case in cases if case["P"] == world or (case["P"] in replicated and case["M"] == 3)]


@pytest.mark.timeout(900)
def test_diffusers_unet_trains_as_if_unpartitioned(subtests: pytest.Subtests) -> None:
    """On four ranks: a wave, and two waves with a replica."""
    cases = [case for case in unet_cases(4) if case["M"] == 3]
    launch_each(subtests, "support.parity:run_cases", 4, cases, timeout=800)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", LAYOUTS)
def test_diffusers_unet_in_every_way(subtests: pytest.Subtests, world: int) -> None:
    launch_each(subtests, "support.parity:run_cases", world, unet_cases(world), timeout=800)


RANDOM_PLANS = [
    ("toy", 2, 4),
    pytest.param("toy", 2, 10, marks=pytest.mark.soak),
    ("toy", 4, 10),
    ("unet", 4, 1),
    pytest.param("unet", 2, 10, marks=pytest.mark.soak),
    pytest.param("unet", 4, 10, marks=pytest.mark.soak),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "world", "count"), RANDOM_PLANS)
def test_random_plans_train_as_if_unpartitioned(
    subtests: pytest.Subtests, model: str, world: int, count: int, tmp_path: Path
) -> None:
    """Random cuts (skips cross ranks) and orders; the last plan runs all forwards first, the worst for memory."""
    graph = graph_of(model)
    cases = []
    for seed in range(count):
        last = seed == count - 1
        plan = random_plan(graph, seed + 10 * world, ranks=world, microbatches=3, greedy_forward=last)
        if last:
            assert max(map(peak_forwards, plan.schedule)) == 3 * len(plan.stages_of(0)), "keeps everything"
        path = tmp_path / f"{seed}.json"
        path.write_text(plan.to_json())
        case = {"model": model, "P": world, "M": 3, "clip": 0.1, "enabled": True}
        cases.append({**case, "plan": str(path), "W": plan.waves, "placement": "auto"})
    launch_each(subtests, "support.parity:run_cases", world, cases, timeout=1700)


SKIP_GRAPHS = [
    (4, 3),
    pytest.param(2, 12, marks=pytest.mark.soak),
    pytest.param(3, 12, marks=pytest.mark.soak),
    pytest.param(4, 24, marks=pytest.mark.soak),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world", "count"), SKIP_GRAPHS)
def test_any_skip_graph_trains_as_if_unpartitioned(
    subtests: pytest.Subtests, world: int, count: int, tmp_path: Path
) -> None:
    """Of 20 layers, linear and wave, drawn plans and the planner's; channels without tags too. See tests/runtime."""
    cases = []
    for number in range(count):
        for placement, ranks in (("linear", Placement.linear(world)), ("wave", Placement.wave(world))):
            model, path = f"irregular {number}", tmp_path / f"{number}-{placement}.json"
            plan = random_plan(graph_of(model), number, ranks=world, microbatches=3, placement=ranks)
            path.write_text(plan.to_json())
            case = {"model": model, "P": world, "M": 3, "clip": 0.1, "enabled": True, "placement": "auto"}
            cases.append({**case, "plan": str(path), "untagged": number == 0})
            cases.append({**case, "placement": placement})
    launch_each(subtests, "support.parity:run_cases", world, cases, timeout=1700)


@pytest.mark.timeout(300)
def test_a_plan_may_number_ranks_the_other_way(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Two pipelines of neighbours, as the plan's layout says, in place of upstream's (0, 2) and (1, 3)."""
    plan = random_plan(graph_of("toy"), 7, ranks=2, microbatches=3)
    path = tmp_path / "plan.json"
    path.write_text(replace(plan, data_parallel=2, layout=Layout.DATA_MAJOR).to_json())
    case = {"model": "toy", "P": 2, "M": 3, "clip": 0.1, "enabled": True, "W": plan.waves, "placement": "auto"}
    case |= {"plan": str(path), "pipelines": [[0, 1], [2, 3]]}
    launch_each(subtests, "support.parity:run_cases", 4, [case], timeout=250)


def graph_of(model: str) -> Graph:
    from deepspeed_pulse.engine.specs import describe

    layers, *_ = models(model)
    return Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(layers())))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", LAYOUTS)
def test_diffusers_unet_whole_product(subtests: pytest.Subtests, world: int) -> None:
    """P x M x W x data parallel x clipping x pulse on and off, on the 46-layer U-Net."""
    cases = []
    for (ranks, _), microbatches, clip in itertools.product(LAYOUTS[world], (1, 2, 3, 8), (0.0, 0.1)):
        case = {"model": "unet", "P": ranks, "M": microbatches, "clip": clip}
        cases += [{**case, "enabled": True, "W": waves} for waves in (1, 2)]
        cases.append({**case, "enabled": False})
    launch_each(subtests, "support.parity:run_cases", world, cases, timeout=3500)
