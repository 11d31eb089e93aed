"""The layers that a rank holds, bound to their declarations and put together to stages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.ir.effects import Effects
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.stage import BoundLayer, Stage
from deepspeed_pulse.runtime.usage import Usage


def bound_layers(
    module: Any, graph: Graph | None = None, effects: Sequence[Effects] = (), recompute: Sequence[int] | None = None
) -> dict[int, BoundLayer]:
    """Layers on this rank with their declarations, by layer index.

    ``graph`` has versions of the values that layers change in place, as ``effects`` says; left out, it is the list as
    it was given. ``recompute``: layers that run again in backward; left out, those of the plan.
    """
    graph = graph or module.graph
    if recompute is None:
        recompute = () if module.plan is None else module.plan.recompute
    return {
        index: BoundLayer(
            graph.layers[index],
            function,
            recompute=index in recompute,
            seed=partial(_seed, module, index) if module.seed_layers else None,
            effects=effects[index] if effects else None,
        )
        for index, function in module.local_layers()
    }


def _seed(module: Any, index: int, number: int) -> None:
    """As upstream under ``seed_layers``: random numbers depend on layer and microbatch, not on the plan."""
    seed = (module.base_seed * (number + 2) + index) % 2**32
    (module.seed_fn or _seed_all)(seed)


def _seed_all(seed: int) -> None:
    """Upstream's ``set_random_seed`` for the devices in use.

    ``torch.manual_seed`` asks each kind of device, and keeps a stack trace of the call for each that was not begun:
    some milliseconds a layer and microbatch.
    """
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().manual_seed_all(seed)


def bound_stages(module: Any, usage: Usage, graph: Graph, effects: Sequence[Effects]) -> dict[int, Stage]:
    """The stages of this rank, ready to run; arguments as of :func:`bound_layers`."""
    bound, asked = bound_layers(module, graph, effects), module.job.recomputing
    return {
        stage: Stage(
            [bound[i] for i in module.plan.stage_layers(stage)],
            usage.exports(stage),
            checkpoint=asked.function,
            interval=max(1, asked.interval),
        )
        for stage in module.plan.stages_of(module.stage_id)
    }
