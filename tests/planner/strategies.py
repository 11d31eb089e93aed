"""Hypothesis strategies and checks that the planner's tests share."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st
from toys import cluster, plan, random_profile

from deepspeed_pulse.ir.cluster import Link
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.planner import violations
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import run, summarize


@st.composite
def problems(draw, max_ranks=4, max_microbatches=6):
    """Any placement, uneven stages, skips, and links from none to ones where messages queue."""
    kind = draw(st.sampled_from(["wave", "linear", "loop"]))
    ranks, waves = draw(st.integers(1, max_ranks)), draw(st.integers(1, 2))
    placement = {
        "wave": Placement.wave(ranks, waves),
        "linear": Placement.linear(ranks),
        "loop": Placement.linear(ranks) * 2,
    }[kind]
    rng = random.Random(draw(st.integers(0, 10**6)))
    costs = random_profile(rng, len(placement), temb=rng.random() < 0.5, strict=False)
    link = Link(
        bandwidth_gb_per_s=draw(st.sampled_from([1e-4, 1e-3, 1e9])),
        latency_us=draw(st.sampled_from([0, 500])),
        one_port=draw(st.booleans()),
    )
    return Problem(plan(placement, draw(st.integers(1, max_microbatches)), of=costs), costs, cluster(link))


def assert_sound(problem, schedule):
    """Valid, free of deadlock and not below the bound; returns the figures."""
    found = replace(problem.plan, schedule=schedule)
    values = problem.profile.values
    assert violations(found, num_layers=problem.profile.num_layers, values=values) == []
    figures = summarize(problem, run(problem, schedule))
    assert figures.makespan_ms >= figures.lower_bound_ms * (1 - 1e-9)
    return figures
