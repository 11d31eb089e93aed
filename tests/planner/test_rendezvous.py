"""Messages that move only once their receive is posted, and the buffers they are received into."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_plans import random_plan
from toys import cluster, plan, rows, uniform, wave

from deepspeed_pulse.ir.channels import MIN_SLOTS, POSTED_AHEAD, arrivals, fewest_slots, make_traffic, unit_clock
from deepspeed_pulse.ir.graph import Graph, Layer
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.program import Channel
from deepspeed_pulse.ir.schedule import Op
from deepspeed_pulse.planner.checks.rendezvous import rendezvous_problems
from deepspeed_pulse.planner.problem import Problem


def random_graph(rng, num_layers):
    """Values with one or several consumers, nested, crossing or neither."""
    stash, pop = [[] for _ in range(num_layers)], [[] for _ in range(num_layers)]
    for number in range(rng.randrange(5)):
        source = rng.randrange(num_layers - 1)
        targets = rng.sample(range(source + 1, num_layers), rng.randrange(1, num_layers - source))
        stash[source].append(f"v{number}")
        for target in targets:
            pop[target].append(f"v{number}")
    return Graph(layers=tuple(Layer(name=str(i), stash=tuple(stash[i]), pop=tuple(pop[i])) for i in range(num_layers)))


@st.composite
def plans(draw):
    rng = random.Random(draw(st.integers(0, 10**6)))
    ranks = draw(st.integers(1, 4))
    graph = random_graph(rng, rng.randrange(2 * ranks, 4 * ranks + 3))
    greedy, linear = draw(st.booleans()), draw(st.booleans())
    return random_plan(
        graph,
        rng.randrange(10**6),
        ranks=ranks,
        microbatches=rng.randrange(1, 7),
        greedy_forward=greedy,
        placement=Placement.linear(ranks) if linear else None,
    )


@settings(max_examples=80, deadline=None)
@given(plans())
def test_every_order_without_a_deadlock_completes_unbuffered(found):
    assert rendezvous_problems(found, make_traffic(found)) == []


@settings(max_examples=80, deadline=None)
@given(plans(), st.booleans())
def test_actions_that_wait_for_all_that_is_under_way_end_where_receives_are_posted_when_due(found, known):
    traffic = make_traffic(found)
    due = [[*map(list, row)] for row in arrivals(traffic.program, found.placement)]
    assert waiting_ranks(traffic, due, known) == []


def test_actions_that_wait_for_all_that_is_under_way_end_nowhere_where_receives_are_posted_at_once():
    """Rank 0 waits in its second forward for a gradient that rank 1 gives after it."""
    found = plan((0, 1), 2, schedule=rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    traffic = make_traffic(found)
    at_once = [[[m for step in row for m in step.receives], *([] for _ in row)] for row in traffic.program]
    assert waiting_ranks(traffic, at_once, True) == [0, 1]


def waiting_ranks(traffic, due, known):
    """Ranks that come to no end when every action waits for what its rank has sent, and for the receives posted there.

    Unless shapes are ``known``, what is due is posted once it was sent: its shapes come before it.
    """
    program = traffic.program
    place = {m: (c, k) for c, messages in traffic.channels.items() for k, m in enumerate(messages)}
    posted, sent, position = Counter(), Counter(), [0] * len(program)
    coming = {rank: [c for c in traffic.channels if c.target_rank == rank] for rank in range(len(program))}
    going = {rank: [c for c in traffic.channels if c.source_rank == rank] for rank in range(len(program))}

    def moved(c):
        return min(sent[c], posted[c])

    def post(rank):
        """False where something that is due cannot be posted yet."""
        while due[rank][position[rank]]:
            c, k = place[due[rank][position[rank]][0]]
            if not known and k >= sent[c]:
                return False
            assert posted[c] == k
            posted[c] += 1
            del due[rank][position[rank]][0]
        return True

    def advance(rank):
        step = program[rank][position[rank]]
        ready = post(rank) and all(k < moved(c) for c, k in (place[m] for m in step.receives))
        if not ready or any(posted[c] > moved(c) for c in coming[rank]) or any(sent[c] > moved(c) for c in going[rank]):
            return
        sent.update(place[m][0] for m in step.sends)
        position[rank] += 1

    before = None
    while before != (before := (sum(posted.values()), sum(position))):
        for rank, row in enumerate(program):
            if position[rank] < len(row):
                advance(rank)
    return [rank for rank, row in enumerate(program) if position[rank] < len(row)]


def times(found, traffic):
    """Per channel: when each message's receive is due and when it is consumed, in unit time."""
    starts, ends, used = unit_clock(traffic.program, found.placement), {}, {}
    for row, when in zip(traffic.program, starts, strict=True):
        for i, (step, start) in enumerate(zip(row, when, strict=True)):
            ends.update(dict.fromkeys(step.sends, start + (1 if step.action.op is Op.FORWARD else 2) - POSTED_AHEAD))
            used.update((m, (start, i, k)) for k, m in enumerate(step.receives))
    return {c: ([ends[m] for m in ms], [used[m] for m in ms]) for c, ms in traffic.channels.items()}


def slot_intervals(used, slots):
    """(slot, posted, consumed) per message: a receive takes a slot that is empty, or the next one to be emptied."""
    free, held, intervals = [((0, -1, -1), slot) for slot in range(slots)], [], []
    for consumed in used:
        if not free:
            held.sort()
            free.append(held.pop(0))
        posted, slot = free.pop(0)
        held.append((consumed, slot))
        intervals.append((slot, posted, consumed))
    return intervals


@settings(max_examples=80, deadline=None)
@given(plans())
def test_slots_are_never_shared_and_the_fewest_that_keep_the_times(found):
    traffic = make_traffic(found)
    for channel, (due, used) in times(found, traffic).items():
        slots = traffic.slots[channel]
        intervals = slot_intervals(used, slots)
        for slot in range(slots):
            live = [(posted, consumed) for s, posted, consumed in intervals if s == slot]
            assert all(before[1] <= after[0] for before, after in pairwise(live)), channel
        assert not late(intervals, due)
        if slots > min(MIN_SLOTS, len(due)):
            assert late(slot_intervals(used, slots - 1), due), "one slot less would do"


def late(intervals, due):
    """Messages whose receive is posted too late (none is before the step), or would be read before."""
    found = enumerate(zip(intervals, due, strict=True))
    return [k for k, ((_, posted, consumed), time) in found if posted[0] > max(time, 0) or posted > consumed]


def test_fewest_slots_by_hand():
    def fewest(due, used):
        return fewest_slots(due, [(time, i, 0) for i, time in enumerate(used)])

    assert fewest([1, 2, 3], [1, 2, 3]) == 1
    assert fewest([1, 2, 3], [4, 5, 6]) == 3
    assert fewest([1, 2, 3], [5, 2, 3]) == 2
    assert fewest_slots([1, 1], [(1, 7, 0), (1, 7, 1)]) == 1
    assert fewest_slots([1, 1], [(1, 7, 1), (1, 7, 0)]) == 2, "the second is read first, while the first holds the slot"


def test_overtaking_needs_as_many_slots_as_are_overtaken():
    """The last of three microbatches is read first: with two slots it has no buffer."""
    order = rows("0F0 0F1 0F2 0B0 0B1 0B2", "1F2 1F0 1F1 1B0 1B1 1B2")
    found = plan((0, 1), 3, schedule=order)
    traffic = make_traffic(found)
    down = Channel(0, 1)
    assert traffic.slots[down] == 3
    assert rendezvous_problems(found, traffic) == []
    lines = rendezvous_problems(found, replace(traffic, slots={**traffic.slots, down: 2}))
    assert any(
        line.startswith("deadlock under unbuffered sends: rank 1 is stuck at 1F2: hidden of microbatch 2 from stage 0")
        and line.endswith("has no receive: 2 slots hold later messages")
        for line in lines
    ), lines


def test_waiting_for_a_send_that_nobody_has_taken_is_a_violation():
    found = plan((0, 1), 1, schedule=rows("0F0 0B0", "1F0 1B0"))
    traffic = make_traffic(found)
    (message,) = traffic.channels[Channel(1, 0)]
    early = ((), (message,))
    lines = rendezvous_problems(found, replace(traffic, releases=(traffic.releases[0], early)))
    assert any("rank 1 is stuck at 1B0" in line and "was never taken" in line for line in lines), lines


@pytest.mark.parametrize("placement", [Placement.wave(4), Placement.linear(6), Placement.wave(2, 2)])
def test_generators_are_free_of_deadlock_unbuffered(placement):
    blank = plan(placement, 12)
    order = wave(Problem(blank, uniform(len(placement)), cluster()), 12)
    found = replace(blank, schedule=order)
    assert rendezvous_problems(found, make_traffic(found)) == []
