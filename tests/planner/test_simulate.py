"""The simulator against schedules drawn by hand, closed forms and the rules of memory."""

from dataclasses import replace
from typing import Any

import pytest
from toys import INSTANT, cluster, gpipe, layer, plan, profile, rows, skip, uniform, wave

from deepspeed_pulse.errors import PlanError
from deepspeed_pulse.ir.cluster import Cluster, Link
from deepspeed_pulse.ir.layout import Grid
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan, Route
from deepspeed_pulse.ir.rules import Rules
from deepspeed_pulse.planner import estimate, simulate
from deepspeed_pulse.planner.checks.audit import audit
from deepspeed_pulse.planner.cost import step_bytes
from deepspeed_pulse.planner.links import Links
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.heuristics import forward_only, one_f_one_b
from deepspeed_pulse.planner.simulator import least_step_ms


def under(plan: Plan, **rules: Any) -> Plan:
    return replace(plan, rules=Rules(**rules))


def staircase(timeline, width):
    """One line a rank; each unit of time shows the action's stage and microbatch, ``.`` is idle."""
    lines = [["..."] * width for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        for unit in range(round(span.start_ms), round(span.end_ms)):
            lines[span.rank][unit] = str(span.work)
    return [" ".join(line) for line in lines]


def test_one_f_one_b_is_the_known_staircase():
    order = one_f_one_b(Problem(plan(Placement.linear(2), 3), uniform(2), cluster()), 3)
    timeline = simulate(plan(Placement.linear(2), 3, schedule=order), uniform(2), cluster())
    assert staircase(timeline, 12) == [
        "0F0 0F1 ... ... 0B0 0B0 0F2 0B1 0B1 ... 0B2 0B2",
        "... 1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2 ... ...",
    ]


def test_wave_is_the_known_staircase():
    blank = plan(Placement.wave(2), 2)
    order = wave(Problem(blank, uniform(4), cluster()), 2)
    timeline = simulate(plan(Placement.wave(2), 2, schedule=order), uniform(4), cluster())
    assert staircase(timeline, 16) == [
        "0F0 0F1 ... 3F0 3B0 3B0 3F1 3B1 3B1 ... 0B0 0B0 ... ... 0B1 0B1",
        "... 1F0 2F0 1F1 2F1 ... 2B0 2B0 1B0 1B0 2B1 2B1 1B1 1B1 ... ...",
    ]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "makespan"),
    [(2, 3, 21), (2, 4, 27), (4, 8, 57), (4, 16, 105), (8, 16, 117), (8, 32, 213)],
)
def test_wave_reaches_its_closed_form_and_the_bound(ranks, microbatches, makespan):
    assert makespan == 6 * microbatches + 3 * (ranks - 1)
    blank = plan(Placement.wave(ranks), microbatches)
    order = wave(Problem(blank, uniform(2 * ranks), cluster()), microbatches)
    found = estimate(plan(Placement.wave(ranks), microbatches, schedule=order), uniform(2 * ranks), cluster())
    assert found.makespan_ms == pytest.approx(makespan)
    assert found.lower_bound_ms == pytest.approx(makespan)
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    assert found.bubble_ratio == pytest.approx(3 * (ranks - 1) / makespan)


@pytest.mark.parametrize(("ranks", "microbatches", "makespan"), [(4, 8, 66), (4, 16, 114), (8, 16, 138), (8, 32, 234)])
def test_one_f_one_b_takes_its_closed_form(ranks, microbatches, makespan):
    assert makespan == 6 * microbatches + 6 * (ranks - 1)
    costs = uniform(ranks, forward_ms=2.0, backward_ms=4.0)
    blank = plan(Placement.linear(ranks), microbatches)
    order = one_f_one_b(Problem(blank, costs, cluster()), microbatches)
    found = estimate(plan(Placement.linear(ranks), microbatches, schedule=order), costs, cluster())
    assert found.makespan_ms == pytest.approx(makespan)
    assert found.peak_bytes == tuple(min(microbatches, ranks - rank) for rank in range(ranks))


def test_split_backward_shares_the_time_between_its_halves():
    costs = profile([layer(1, 2, weight_grad_ms=0.5), layer(1, 2)])
    order = rows("0F0 0I0 0W0", "1F0 1I0 1W0")
    timeline = simulate(plan((0, 1), 1, schedule=order), costs, cluster())
    spans = {str(span.work): (span.start_ms, span.end_ms) for span in timeline.spans}
    assert spans == {"0F0": (0, 1), "1F0": (1, 2), "1I0": (2, 3), "1W0": (3, 4), "0I0": (3, 4.5), "0W0": (4.5, 5)}


def test_gradients_that_an_input_half_keeps_live_until_its_weight_half_ends():
    costs = profile([layer(weight_grad_ms=0.5, activation_bytes=10, late_bytes=3) for _ in range(2)])
    found = plan((0, 0), 1, schedule=rows("0F0 1F0 1I0 0I0 1W0 0W0"))
    curve = [live for _, live in simulate(found, costs, cluster()).memory[0]]
    assert curve == [10, 20, 20 + 3, 20 + 2 * 3, 10 + 3, 0]


def test_messages_queue_on_a_link_and_do_not_occupy_ranks():
    """1 GB/s = 1e6 bytes a ms: 3 ms on the link, 1 ms latency; the second waits for the first, not for its arrival."""
    slow = cluster(Link(bandwidth_gb_per_s=1.0, latency_us=1000.0))
    costs = uniform(2, output_bytes=3_000_000)
    timeline = simulate(plan((0, 1), 2, schedule=rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")), costs, slow)
    forward = [(t.leave_ms, t.arrive_ms) for t in timeline.transfers if t.message.label == "hidden"]
    assert forward == [(1, 5), (4, 8)]
    assert [s.start_ms for s in timeline.spans_of(1)] == [5, 8, 9, 11]
    assert [s.start_ms for s in timeline.spans_of(0)] == [0, 1, 15, 18]


def test_a_rank_that_only_passes_a_value_on_holds_it_until_its_peer_has_it():
    costs = profile([layer() for _ in range(3)], [skip("s", 0, 2, size=100)])
    made = plan(Placement.linear(3), 1, schedule=rows("0F0 0B0", "1F0 1B0", "2F0 2B0"))
    made = replace(made, routes=(Route(name="s", source_stage=0, hops=((0, 1), (1, 2))),))
    held = [live for _, live in simulate(made, costs, cluster()).memory[1]]
    value, gradient, activation = 100, 100, 1
    forward = value + gradient + activation
    assert held == [value + gradient, forward, forward, activation, gradient, 0]


def test_values_that_stay_cost_nothing_and_those_without_gradient_send_nothing_back():
    costs = profile(
        [layer(output_bytes=10) for _ in range(4)],
        [skip("local", 0, 3, 1000), skip("mask", 0, 2, 7, gradient=False), skip("odd", 0, 1, 5)],
    )
    order = rows("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    found = plan(Placement.wave(2), 1, schedule=order, of=costs)
    sent = {(t.message.label, t.num_bytes) for t in simulate(found, costs, cluster()).transfers}
    assert sent == {("hidden", 10), ("hidden_grad", 10), ("value:mask", 7), ("value:odd", 5), ("value_grad:odd", 5)}
    assert estimate(found, costs, cluster()).p2p_bytes_per_microbatch == 4 * 10 + 7 + 2 * 5


def test_messages_that_queue_bound_a_step():
    """1 ms until the first leaves, three of 10 ms, and 1 + 2 + 10 + 2 ms behind the last."""
    costs = uniform(2, output_bytes=10_000_000)
    order = rows("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    slow = cluster(Link(bandwidth_gb_per_s=1.0, latency_us=0.0))
    found = estimate(plan(Placement.linear(2), 3, schedule=order), costs, slow)
    assert found.makespan_ms == found.lower_bound_ms == 46.0


def test_messages_to_two_ranks_queue_where_one_port_is_all_there_is():
    """3 ms for the next rank, 3 ms for the one after it: side by side, or one after the other."""
    costs = uniform(3, output_bytes=3_000_000)
    costs = replace(costs, skips=(skip("far", 0, 2, 3_000_000),))
    order = rows("0F0 0B0", "1F0 1B0", "2F0 2B0")
    found = plan(Placement.linear(3), 1, schedule=order, of=costs)
    for one_port, leave in ((False, [1, 1]), (True, [1, 4])):
        link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0, one_port=one_port)
        sent = [t for t in simulate(found, costs, cluster(link)).transfers if t.source_rank == 0]
        assert [(t.leave_ms, t.arrive_ms - t.leave_ms) for t in sent] == [(start, 3) for start in leave]


def test_a_card_is_not_the_link_to_the_first_rank():
    """Two nodes of two ranks; only within a node do messages leave through one port."""
    within = Link(bandwidth_gb_per_s=1.0, latency_us=0.0, one_port=True)
    machines = replace(cluster(ranks=2), nodes=2, intra_node=within)
    links = Links(machines, Grid(pipeline_ranks=4, data_parallel=1))
    assert links.port(2, 3) not in {links.port(2, 0), links.port(2, 1)}
    assert links.port(3, 2) not in {links.port(3, 0), links.port(3, 1), links.port(2, 3)}


def test_links_within_and_between_nodes_are_ports_of_their_own():
    """Rank 0 sends to rank 1 of its node and to rank 2 of another one at the same time."""
    costs = replace(uniform(3, output_bytes=3_000_000), skips=(skip("far", 0, 2, 6_000_000),))
    found = plan(Placement.linear(3), 1, schedule=rows("0F0 0B0", "1F0 1B0", "2F0 2B0"), of=costs)
    near, far = (Link(bandwidth_gb_per_s=speed, latency_us=0.0, one_port=True) for speed in (1.0, 2.0))
    nodes = Cluster(name="two", nodes=2, ranks_per_node=2, memory_bytes=1, intra_node=near, inter_node=far)
    sent = [t for t in simulate(found, costs, nodes).transfers if t.source_rank == 0]
    assert [(t.target_rank, t.leave_ms, t.arrive_ms) for t in sent] == [(1, 1, 4), (2, 1, 4)]


def test_gradients_hold_up_messages_where_one_port_is_all_there_is():
    """1 ms a message, 10 ms a sum: stage 2's gradients leave from 11 to 21, stage 1's message at 21, not 13."""
    costs = uniform(4, output_bytes=1_000_000, param_bytes=10_000_000)
    order = rows("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    found = plan(Placement.wave(2), 1, schedule=order, data_parallel=2)
    own = cluster(Link(bandwidth_gb_per_s=1.0, latency_us=0.0))
    shared = cluster(replace(own.intra_node, one_port=True))
    apart = estimate(found, costs, own)
    assert (apart.makespan_ms, apart.step_ms) == (pytest.approx(16), pytest.approx(31))
    held_up = estimate(found, costs, shared)
    assert (held_up.makespan_ms, held_up.step_ms) == (pytest.approx(24), pytest.approx(34))
    late = estimate(under(found, reduce_early=False), costs, shared)
    assert (late.makespan_ms, late.step_ms) == (pytest.approx(16), pytest.approx(36))
    sharded = under(found, zero_stage=1, reduce_early=False)
    assert (
        simulate(sharded, costs, shared).makespan_ms == estimate(sharded, costs, shared).makespan_ms == late.makespan_ms
    )
    assert [(r.stage, r.start_ms) for r in simulate(found, costs, shared).reductions] == [
        (3, 9),
        (2, 11),
        (1, 22),
        (0, 24),
    ]


def test_links_follow_the_pipe_major_topology():
    """Two ranks a node and two data-parallel peers: the pipeline crosses nodes."""
    fast, slow = Link(bandwidth_gb_per_s=1e9, latency_us=0), Link(bandwidth_gb_per_s=1e9, latency_us=2000)
    two = Cluster(name="two", nodes=2, ranks_per_node=2, memory_bytes=1, intra_node=fast, inter_node=slow)
    order = rows("0F0 0B0", "1F0 1B0")
    assert simulate(plan((0, 1), 1, schedule=order), uniform(2), two).makespan_ms == pytest.approx(6)
    paired = plan((0, 1), 1, schedule=order, data_parallel=2)
    assert simulate(paired, uniform(2), two).makespan_ms == pytest.approx(10)


def test_messages_keep_their_ranks_from_other_work():
    """Each end of a message takes 0.5 ms; six of the eight in turn. Without messages nothing is longer."""
    busy = cluster(replace(INSTANT, overhead_us=500.0))
    order = rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    assert simulate(plan((0, 1), 2, schedule=order), uniform(2), cluster()).makespan_ms == pytest.approx(9)
    assert simulate(plan((0, 1), 2, schedule=order), uniform(2), busy).makespan_ms == pytest.approx(9 + 6 * 0.5)
    alone = plan((0, 0), 2, schedule=rows("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"))
    assert simulate(alone, uniform(2), busy).makespan_ms == pytest.approx(12)


def test_gradient_reduction_is_hidden_except_for_its_tail():
    """Ring of 2: 2 rounds of bytes/2, 1 MB at 1 GB/s = 1 ms. Stage 1 reduces while stage 0 still works."""
    link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)
    costs = uniform(2, param_bytes=1_000_000)
    order = rows("0F0 0B0", "1F0 1B0")
    found = estimate(plan((0, 1), 1, schedule=order, data_parallel=2), costs, cluster(link))
    assert (found.makespan_ms, found.step_ms) == (pytest.approx(6), pytest.approx(7))
    assert found.samples_per_second == pytest.approx(1e3 * 2 / 7)
    slower = cluster(replace(link, bus_gb_per_s=0.5))
    assert estimate(plan((0, 1), 1, schedule=order, data_parallel=2), costs, slower).step_ms == pytest.approx(8)
    later = cluster(replace(link, bus_latency_us=250.0))  # two rounds
    assert estimate(plan((0, 1), 1, schedule=order, data_parallel=2), costs, later).step_ms == pytest.approx(7.5)
    assert estimate(plan((0, 1), 1, schedule=order), costs, cluster(link)).step_ms == pytest.approx(6)


def summed_layer_by_layer(layers, start_ms, ms_per_byte):
    """When the last of a stage's gradients is summed, each layer's leaving as soon as its backward is over."""
    now, free = start_ms, 0.0
    for one in reversed(layers):
        now += one.backward_ms
        if one.param_bytes:
            free = max(free, now) + one.param_bytes * ms_per_byte
    return max(now, free)


@pytest.mark.parametrize(
    ("sizes", "step_ms"),
    [
        ([1, 1, 1, 1], 12 + 1),  # one layer's is left
        ([4, 4, 4, 4], 4 + 2 + 16),  # the link is busy from the last layer's on
        ([0, 1, 1, 1], 12),  # the last one leaves 2 ms before the end
        ([1, 1, 0, 0], 12 + 1),
        ([4, 0, 0, 0], 12 + 4),
        ([0, 0, 0, 0], 12),
    ],
)
def test_gradients_leave_while_the_last_backward_runs(sizes, step_ms):
    """Four layers of 1 + 2 ms in one stage, each a bucket; 1 MB takes 1 ms."""
    layers = [layer(param_bytes=size * 10**6) for size in sizes]
    found = plan((0,), 1, schedule=rows("0F0 0B0"), data_parallel=2, boundaries=(0, 4))
    found = replace(found, bucket_bytes=10**6)
    made = estimate(found, profile(layers), cluster(Link(bandwidth_gb_per_s=1.0, latency_us=0.0)))
    assert made.step_ms == pytest.approx(step_ms)
    assert made.step_ms == pytest.approx(max(12, summed_layer_by_layer(layers, 4.0, 1e-6)))
    assert least_step_ms(Problem(found, profile(layers), cluster(Link(bandwidth_gb_per_s=1.0, latency_us=0.0)))) <= (
        made.step_ms * (1 + 1e-9)
    )


def test_a_sharded_optimizer_scatters_and_gathers_at_the_end():
    """Ring of 2, 1 MB at 1 GB/s: half a ms each way, two stages on rank 0. Early, all is summed: stage 1's hidden."""
    link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)
    costs = uniform(2, param_bytes=1_000_000)
    found = plan((0, 0), 1, schedule=rows("0F0 1F0 1B0 0B0"), data_parallel=2)
    assert estimate(found, costs, cluster(link)).step_ms == pytest.approx(6 + 1)
    assert estimate(under(found, zero_stage=1, reduce_early=False), costs, cluster(link)).step_ms == pytest.approx(
        6 + 2 * 0.5 + 2 * 0.5
    )
    early = estimate(under(found, zero_stage=1), costs, cluster(link))
    assert early.step_ms == pytest.approx(6 + 1 + 2 * 0.5)


def test_reduction_at_the_end_hides_nothing():
    """As the engine does it where DeepSpeed's ZeRO optimizer holds the gradients: 4 ms a stage after 6."""
    link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)
    found = plan((0, 0), 1, schedule=rows("0F0 1F0 1B0 0B0"), data_parallel=2)
    costs = uniform(2, param_bytes=4_000_000)
    assert estimate(found, costs, cluster(link)).step_ms == pytest.approx(12)
    assert estimate(under(found, reduce_early=False), costs, cluster(link)).step_ms == pytest.approx(14)


def test_reductions_of_one_rank_follow_one_another():
    """4 ms each: stage 1's runs from 4 to 8 behind 0B0 (4 to 6), then stage 0's from 8 to 12."""
    link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)
    costs = uniform(2, param_bytes=4_000_000)
    found = plan((0, 0), 1, schedule=rows("0F0 1F0 1B0 0B0"), data_parallel=2)
    assert estimate(found, costs, cluster(link)).step_ms == pytest.approx(12)


RULES = {"": {}, "fused": {"fused_optimizer": True}, "ZeRO-1": {"zero_stage": 1}}


@pytest.mark.parametrize(
    ("dtype", "rules", "state", "step"),
    [
        ("float32", "", 4, 1),
        ("float32", "fused", 4, 0),
        ("float32", "ZeRO-1", 4.5, 1),
        ("bfloat16", "", 5, 2),
        ("bfloat16", "fused", 5, 1),
        ("bfloat16", "ZeRO-1", 6, 1),
        ("float16", "", 8, 4),
        ("float16", "fused", 8, 2),
        ("float16", "ZeRO-1", 6, 1),
    ],
)
def test_peak_is_state_plus_what_is_live_or_the_step(dtype, rules, state, step):
    """In a hundred bytes of weights, on two replicas.

    Shared optimizer state is two moments and master weights. ZeRO-1 has a bucket, and another one when it sums. In bf16
    without it a backward makes gradients beside the optimizer's sums.
    """
    made = 100 if dtype == "bfloat16" and rules != "ZeRO-1" else 0
    costs = profile([layer(param_bytes=100, activation_bytes=7)], dtype=dtype)
    found = under(plan((0,), 2, schedule=rows("0F0 0F1 0B0 0B1"), data_parallel=2), **RULES[rules])
    assert estimate(found, costs, cluster()).peak_bytes == (state * 100 + max(2 * 7 + made, step * 100),)
    full = replace(costs, layers=(replace(costs.layers[0], activation_bytes=300),))
    assert estimate(found, full, cluster()).peak_bytes == (state * 100 + 2 * 300 + made,)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_a_step_under_zero_1_follows_its_bucket(replicas, monkeypatch):
    """What is left of 3 shares in 16 bit when a bucket of little and the other shares' gradients have gone."""
    monkeypatch.setattr("deepspeed_pulse.planner.cost.bucket_bytes", lambda dtype: 10)
    held = step_bytes(profile([layer()], dtype="bfloat16"), 800, Rules.of(1), replicas)
    assert held == {1: 2390, 2: 790, 4: 10, 8: 10}[replicas]


def test_shared_optimizer_state_is_gathered_after_the_step():
    """4 ms to sum, in bf16 2 more to gather what each replica has stepped."""
    link = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)
    found = plan((0,), 1, schedule=rows("0F0 0B0"), data_parallel=2)
    for dtype, gathering in (("float32", 0), ("float16", 0), ("bfloat16", 2)):
        costs = profile([layer(param_bytes=4_000_000)], dtype=dtype)
        assert estimate(found, costs, cluster(link)).step_ms == pytest.approx(3 + 4 + gathering)


def test_a_layers_workspace_is_there_while_it_runs():
    """Stage 0 holds the larger one of its two layers, less what the other one has not kept yet, or no more."""
    costs = profile([layer(workspace_bytes=50), layer(workspace_bytes=30), layer(workspace_bytes=4)])
    found = plan((0, 0), 1, schedule=rows("0F0 1F0 1B0 0B0"), boundaries=(0, 2, 3))
    curve = simulate(found, costs, cluster()).memory[0]
    assert curve == ((0.0, 51), (2.0, 7), (3.0, 7), (5.0, 51), (9.0, 0))


def test_a_rank_that_is_too_full_is_told_where():
    costs = profile([layer(activation_bytes=7)])
    found = plan((0,), 2, schedule=rows("0F0 0F1 0B0 0B1"))
    (line,) = (x for x in audit(found, costs, cluster(memory_bytes=13)).problems if x.startswith("memory"))
    assert "at 1 ms, at 0F1" in line
    assert not [x for x in audit(found, costs, cluster(memory_bytes=14)).problems if x.startswith("memory")]


def test_receive_buffers_live_from_when_they_are_posted_until_they_are_used():
    """Rank 1 posts two microbatches' receives with the step, the third's when the first's are read; a value stays
    until its backward has ended. Its gradients stay until the end: no later message tells that rank 0 has them."""
    costs = profile(
        [layer(1, 1, activation_bytes=0, output_bytes=100), layer(4, 1, activation_bytes=1000)], [skip("v", 0, 1, 10)]
    )
    orders = rows("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    found = plan((0, 1), 3, schedule=orders, of=costs)
    curve = [(round(time, 3), live) for time, live in simulate(found, costs, cluster()).memory[1]]
    gradient = 100 + 10
    assert curve[-1] == (17.0, 0)
    assert [live for _, live in curve] == [220, 1230, 2130, 3030, 2020 + gradient, 1010 + 2 * gradient, 3 * gradient, 0]


def test_gradients_wait_for_the_backward_that_takes_them():
    """A value read on its own rank, and the hidden state at the turn of a wave."""
    costs = profile([layer(activation_bytes=0, output_bytes=10, unkept_output_bytes=0)] * 2, [skip("v", 0, 1, 100)])
    found = plan((0, 0), 2, schedule=rows("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"), of=costs)
    (curve,) = simulate(found, costs, cluster()).memory
    assert [(round(time), live) for time, live in curve] == [(6, 110), (8, 210), (10, 100), (12, 0)]


def test_a_hidden_state_that_stays_waits_for_the_forward_that_reads_it():
    """As far as the stage that made it does not keep it; at once read, it is among what its stages work with."""
    costs = profile([layer(activation_bytes=0, output_bytes=10, unkept_output_bytes=7)] * 2)
    found = plan((0, 0), 2, schedule=rows("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1"))
    (curve,) = simulate(found, costs, cluster()).memory
    assert [(round(time), live) for time, live in curve] == [(1, 7), (2, 7), (3, 0)]


@pytest.mark.parametrize(
    "placement", [Placement.linear(3), Placement.wave(3), Placement.wave(2, 2), Placement.loop(2, 2)]
)
def test_everything_is_free_at_the_end(placement):
    costs = uniform(len(placement), output_bytes=5)
    order = gpipe(Problem(plan(placement, 3), costs, cluster()), 3)
    for row in simulate(plan(placement, 3, schedule=order), costs, cluster()).memory:
        assert row[-1][1] == 0
        assert all(live >= 0 for _, live in row)


@pytest.mark.parametrize(
    "placement", [Placement.linear(3), Placement.wave(3), Placement.wave(2, 2), Placement.loop(2, 2)]
)
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_forward_only_runs_on_any_placement(placement, microbatches):
    order = forward_only(placement, microbatches)
    timeline = simulate(plan(placement, microbatches, schedule=order), uniform(len(placement)), cluster())
    assert len(timeline.spans) == len(placement) * microbatches
    work = max(placement.count(rank) for rank in placement) * microbatches
    assert timeline.makespan_ms <= work + 2 * len(placement)


def test_a_deadlock_names_every_rank_and_what_it_waits_for():
    order = rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    with pytest.raises(PlanError) as caught:
        simulate(plan((0, 1), 2, schedule=order), uniform(2), cluster())
    assert "rank 0 is stuck at 0B0, which waits for 1B0 of rank 1" in str(caught.value)
    assert "rank 1 is stuck at 1F1, which waits for 0F1 of rank 0" in str(caught.value)


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(PlanError, match="cuts 2 layers, the profile 'toy' has 3"):
        simulate(plan((0, 1), 1, schedule=rows("0F0 0B0", "1F0 1B0")), uniform(3), cluster())


def test_a_route_beyond_the_stages_is_refused():
    costs = profile(uniform(2).layers, [skip("far", 0, 1)])
    found = plan(Placement.linear(2), 1, schedule=rows("0F0 0B0", "1F0 1B0"))
    far = replace(found, routes=(Route(name="far", source_stage=0, hops=((0, 2),)),))
    with pytest.raises(PlanError, match=r"the route of 'far' names a stage outside 0\.\.1$"):
        simulate(far, costs, cluster())


def test_a_step_that_takes_no_time_has_no_throughput():
    costs = uniform(2, forward_ms=0.0, backward_ms=0.0)
    order = rows("0F0 0B0", "1F0 1B0")
    figures = estimate(plan((0, 1), 1, schedule=order), costs, cluster())
    assert (figures.step_ms, figures.gap, figures.samples_per_second) == (0.0, 0.0, 0.0)
