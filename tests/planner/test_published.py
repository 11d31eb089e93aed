"""Figures of the PULSE paper (arXiv 2606.19163) and closed forms of step lengths, through the package's own planner."""

import math

import pytest
from support.published import HUNYUAN, HUNYUAN_NAMED, MIB, RELAYED, UVIT, closed_forms, relayed_mib, sent_mib, uniform
from toys import cluster, plan, wave

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.simulator import run, summarize


@pytest.mark.parametrize(("costs", "ranks", "published"), UVIT)
def test_uvit_traffic(costs, ranks, published):
    assert sent_mib(costs(), ranks) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("costs", "ranks", "published"), HUNYUAN)
def test_hunyuan_traffic_with_the_text_in_the_hidden_state(costs, ranks, published):
    """As in the paper: every boundary carries the text, on the way down and again on the way up."""
    assert sent_mib(costs(), ranks) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("costs", "ranks", "expected"), HUNYUAN_NAMED)
def test_hunyuan_traffic_with_the_text_as_a_named_value_or_from_the_batch(costs, ranks, expected):
    assert sent_mib(costs(), ranks) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("blocks", "ranks", "size", "published"), RELAYED)
def test_traffic_of_relayed_skips(blocks, ranks, size, published):
    """The baseline of the paper: every skip through every stage between its ends, 2 ((K + 4) D / 4 - 1) payloads."""
    assert relayed_mib(blocks, ranks, size) == pytest.approx(2 * ((blocks + 4) * ranks / 4 - 1) * size / MIB)
    assert relayed_mib(blocks, ranks, size) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize("ranks", [*range(1, 9), 13, 16])
def test_uniform_wave_takes_6m_plus_3p_less_3(ranks):
    """For every M >= 1.5 P, which is the bound."""
    costs, placement, least = uniform(2 * ranks), Placement.wave(ranks), math.ceil(1.5 * ranks)
    for microbatches in range(least, 3 * ranks + 1 if ranks <= 8 else least + 3):
        problem = Problem(plan(placement, microbatches), costs, cluster())
        found = summarize(problem, run(problem, wave(problem, microbatches)))
        assert found.makespan_ms == pytest.approx(6 * microbatches + 3 * (ranks - 1)), microbatches
        assert found.gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 5), (4, 6), (5, 8), (8, 12), (8, 14), (8, 20)])
def test_plans_by_name_take_their_closed_forms(ranks, microbatches):
    """``benchmarks/planner/published.py`` tries all up to P = 8."""
    for name, expected, found in closed_forms(ranks, microbatches):
        assert found == pytest.approx(expected), name
