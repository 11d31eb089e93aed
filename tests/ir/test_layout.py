"""Numbering of ranks: what crosses nodes follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_pulse.errors import FileError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.layout import Grid, Layout
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import backward, forward
from deepspeed_pulse.planner.links import Links

FAST, SLOW = Link(bandwidth_gb_per_s=100.0, latency_us=1.0), Link(bandwidth_gb_per_s=1.0, latency_us=10.0)


def nodes_of(ranks_per_node: int) -> Cluster:
    return Cluster(name="c", nodes=4, ranks_per_node=ranks_per_node, memory_bytes=1, intra_node=FAST, inter_node=SLOW)


@pytest.mark.parametrize(("layout", "numbers"), [(Layout.PIPE_MAJOR, [0, 1, 2, 3]), (Layout.DATA_MAJOR, [0, 2, 1, 3])])
def test_numbers_are_those_of_upstreams_topologies(layout: Layout, numbers: list[int]) -> None:
    grid = Grid(pipeline_ranks=2, data_parallel=2, layout=layout)
    assert [grid.global_rank(pipe, data) for pipe in (0, 1) for data in (0, 1)] == numbers


def test_neighbours_share_a_node() -> None:
    """Four nodes of four, P = G = 4: either the pipeline or its replicas are inside."""
    pipe_major, data_major = (Grid(pipeline_ranks=4, data_parallel=4, layout=layout) for layout in Layout)
    assert Links(nodes_of(4), pipe_major).between(1, 2) == SLOW
    assert Links(nodes_of(4), pipe_major).of_peers(1) == FAST
    assert Links(nodes_of(4), data_major).between(1, 2) == FAST
    assert Links(nodes_of(4), data_major).of_peers(1) == SLOW


def test_a_boundary_is_as_slow_as_its_slowest_replica() -> None:
    """P = 3 on nodes of four: the first pipeline is inside a node, the second (ranks 3, 4, 5) is not."""
    grid = Grid(pipeline_ranks=3, data_parallel=2, layout=Layout.DATA_MAJOR)
    assert Links(nodes_of(4), grid).between(0, 1) == SLOW
    assert Links(nodes_of(4), grid).between(1, 2) == FAST
    assert Links(nodes_of(4), replace(grid, data_parallel=1)).between(0, 1) == FAST


PLAN = Plan(
    pipeline_ranks=1,
    data_parallel=2,
    microbatches=1,
    microbatch_size=1,
    boundaries=(0, 1),
    placement=(0,),
    schedule=((forward(0, 0), backward(0, 0)),),
)


def test_plan_files_name_a_layout_that_is_not_upstreams() -> None:
    assert "layout" not in PLAN.to_json()
    other = replace(PLAN, layout=Layout.DATA_MAJOR)
    assert Plan.from_json(other.to_json()) == other
    for bad in ('"sideways"', "3", "true"):
        with pytest.raises(FileError, match=r"plan: field 'layout': expected"):
            Plan.from_json(other.to_json().replace('"data-major"', bad))
