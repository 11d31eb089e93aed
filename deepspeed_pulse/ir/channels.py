"""Messages seen from the channels: their order, how many buffers they need, when a send is over.

Everything here follows from the program alone, so both ends of a channel agree without talking.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from deepspeed_pulse.errors import PlanError
from deepspeed_pulse.ir.carried import Part, program_of
from deepspeed_pulse.ir.dependencies import Item, Result, ordered, result_of, results_needed, rows_of
from deepspeed_pulse.ir.fill import Fill, FrozenWork, HandOver
from deepspeed_pulse.ir.keys import Key, key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import Channel, Message, Program, Step, channel_of
from deepspeed_pulse.ir.schedule import OP_RULES

MIN_SLOTS = 2
"""Receives posted ahead on a channel, at least; on one of frozen results just as many."""

POSTED_AHEAD = 2
"""How long before its message leaves a receive is posted, in the time of a forward: as long as a backward takes.

gloo sends nothing before it knows that the receive is posted, and that word queues behind what the receiver sends.
"""

_LAST = 1 << 60


@dataclass(frozen=True)
class Traffic:
    """Messages of a plan, by channel.

    Attributes:
        program: steps of every rank.
        channels: messages of each channel in the order in which the sender produces them.
        slots: receive buffers of each channel: the fewest with which every receive is posted :data:`POSTED_AHEAD` of
            its message when an action takes its usual share of time (forward 1, backward 2), but two, so that one can
            arrive while the one before it is read.
        releases: per rank and step, the rank's own earlier sends that its peer must have received
            once this step's messages are here (the peer sent one of them after consuming the send).
    """

    program: Program
    channels: dict[Channel, tuple[Message, ...]]
    slots: dict[Channel, int]
    releases: tuple[tuple[tuple[Message, ...], ...], ...]


def make_traffic(plan: Plan, part: Part = Part.WHOLE) -> Traffic:
    """Analyse a plan's messages. Raises PlanError when the order of actions deadlocks."""
    return traffic_of(program_of(plan, part), plan.placement)


_Ends = dict[Message, tuple[int, int]]
"""Rank and position of the step that sends a message, or receives it."""

_Sent = TypeVar("_Sent", bound=Message | Result)


def _ends(program: Program) -> tuple[_Ends, _Ends]:
    sent_at = {m: (rank, i) for rank, row in enumerate(program) for i, step in enumerate(row) for m in step.sends}
    used_at = {m: (rank, i) for rank, row in enumerate(program) for i, step in enumerate(row) for m in step.receives}
    if sent_at.keys() != used_at.keys():
        odd = next(m for m in (*sent_at, *used_at) if m not in sent_at or m not in used_at)
        raise PlanError(
            f"the schedule lacks an action: {odd.label} of microbatch {odd.microbatch} from stage "
            f"{odd.source_stage} to stage {odd.target_stage} has only one end"
        )
    return sent_at, used_at


def traffic_of(program: Program, placement: Placement) -> Traffic:
    """Analyse a program's messages.

    Raises PlanError when a message has only one end, or the order of actions deadlocks.
    """
    sent_at, used_at = _ends(program)
    channels: dict[Channel, list[Message]] = defaultdict(list)
    for message in sent_at:
        channels[channel_of(message, placement)].append(message)
    starts = unit_clock(program, placement)

    def slots(messages: list[Message]) -> int:
        """In unit time; at least ``MIN_SLOTS`` where there are as many messages."""
        due, used = [], []
        for message in messages:
            (rank, i), (target, j) = sent_at[message], used_at[message]
            due.append(starts[rank][i] + OP_RULES[program[rank][i].action.op].units - POSTED_AHEAD)
            used.append((starts[target][j], j, program[target][j].receives.index(message)))
        return max(fewest_slots(due, used), min(MIN_SLOTS, len(messages)))

    return Traffic(
        program=program,
        channels={c: tuple(messages) for c, messages in channels.items()},
        slots={c: slots(channels[c]) for c in channels},
        releases=tuple(
            _releases([s.receives for s in steps], [s.sends for s in steps], sent_at, used_at) for steps in program
        ),
    )


def unit_clock(program: Program, placement: Placement) -> list[list[int]]:
    """Start of every step when forward takes 1, backward 2 and messages nothing.

    Raises PlanError when the order deadlocks; it shows the action every rank is stuck at and what it waits for.
    """
    starts: list[list[int]] = [[] for _ in program]
    free = [0] * len(program)
    ends: dict[Key, int] = {}
    for rank, step in ordered(program, placement):
        assert isinstance(step, Step)
        start = max([free[rank], *(ends[key] for key in step.needs)])
        free[rank] = ends[key_of(step.action)] = start + OP_RULES[step.action.op].units
        starts[rank].append(start)
    return starts


def arrivals(program: Program, placement: Placement) -> tuple[tuple[tuple[Message, ...], ...], ...]:
    """Per rank and step, the messages that have left since the step before, in unit time, the earliest first.

    Receives that are posted there wait for nothing that this step or a later one causes, on any rank: actions that each
    wait for all receives posted on their rank and all sends made there still end, in the order of :func:`unit_clock`.
    """
    starts = unit_clock(program, placement)
    found: list[list[list[Message]]] = [[[] for _ in row] for row in program]
    sent = sorted(
        (
            (start + OP_RULES[step.action.op].units, rank, i)
            for rank, row in enumerate(program)
            for i, (step, start) in enumerate(zip(row, starts[rank], strict=True))
        )
    )
    for left, rank, i in sent:
        for message in program[rank][i].sends:
            target = placement[message.target_stage]
            found[target][bisect_left(starts[target], left)].append(message)
    return tuple(tuple(map(tuple, row)) for row in found)


def fewest_slots(due: Sequence[float], used: Sequence[tuple[float, int, int]]) -> int:
    """Buffers with which every receive of a channel is posted when it is due.

    Receives are posted in the channel's order, one for each buffer and one more whenever a message is consumed: with n
    buffers, message k can arrive once k + 1 - n of the messages before it have been consumed. ``due``: when each
    message's receive is to be posted, in the channel's order. ``used``: when each is consumed, with the receiver's
    action and the position there.
    """
    ended: list[tuple[float, int, int]] = []
    most = 1
    for time, consumed in zip(due, used, strict=True):
        most = max(most, len(ended) + 1 - bisect_right(ended, min((time, _LAST, _LAST), consumed)))
        insort(ended, consumed)
    return most


def _releases(
    receives: Sequence[Sequence[_Sent]],
    sends: Sequence[Sequence[_Sent]],
    sent_at: Mapping[_Sent, tuple[int, int]],
    used_at: Mapping[_Sent, tuple[int, int]],
) -> tuple[tuple[_Sent, ...], ...]:
    """Of one rank: what its peer sent from an action that consumed a send on, or later, tells that it was received."""
    found: list[list[_Sent]] = [[] for _ in receives]
    arrivals: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, messages in enumerate(receives):
        for message in messages:
            peer, sent = sent_at[message]
            arrivals[peer].append((sent, i))
    earliest: dict[int, list[int]] = {}
    for peer, pairs in arrivals.items():
        pairs.sort()
        earliest[peer] = [*accumulate((i for _, i in reversed(pairs)), min)][::-1]
    for messages in sends:
        for message in messages:
            peer, used = used_at[message]
            k = bisect_left(arrivals[peer], (used, 0))
            if k < len(arrivals[peer]):
                found[earliest[peer][k]].append(message)
    return tuple(map(tuple, found))


def known_hand_overs(program: Program, fill: Fill) -> tuple[dict[int | FrozenWork, tuple[HandOver, ...]], ...]:
    """Per rank, the hand-overs that it knows to be over, by when: so many of its actions have ended, or that work has.

    What tells is anything that the peer sent when it had used the result, a message or another result. What a rank
    never knows is left out.
    """
    rows = rows_of(program, fill)
    sent_at: dict[Message | Result, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for i, item in enumerate(row):
            sent_at.update((each, (rank, i)) for each in _given(rank, item))
    used_at: dict[Message | Result, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for i, item in enumerate(row):
            for each in _taken(rank, item, fill):
                if each in sent_at:
                    used_at.setdefault(each, (rank, i))
    for each in sent_at:
        if isinstance(each, Result):
            used_at.setdefault(each, (each.rank, _LAST))  # for the next step alone
    found = []
    for rank, row in enumerate(rows):
        receives = [[x for x in _taken(rank, item, fill) if used_at.get(x) == (rank, i)] for i, item in enumerate(row)]
        sends = [[x for x in _given(rank, item) if isinstance(x, Result)] for item in row]
        found.append(_by_time(row, _releases(receives, sends, sent_at, used_at)))
    return tuple(found)


def _given(rank: int, item: Item) -> Sequence[Message | Result]:
    """What leaves a rank with an item of its row."""
    if isinstance(item, Step):
        return item.sends
    return (result_of(rank, item),) if isinstance(item, HandOver) else ()


def _taken(rank: int, item: Item, fill: Fill) -> Sequence[Message | Result]:
    return item.receives if isinstance(item, Step) else results_needed(rank, item, fill)


def _by_time(
    row: Sequence[Item], over: Sequence[Sequence[Message | Result]]
) -> dict[int | FrozenWork, tuple[HandOver, ...]]:
    found: dict[int | FrozenWork, tuple[HandOver, ...]] = {}
    actions = 0
    for item, results in zip(row, over, strict=True):
        actions += isinstance(item, Step)
        work = tuple(HandOver(r.part, r.done, r.microbatch, r.rank) for r in results if isinstance(r, Result))
        if work:
            found[actions if isinstance(item, Step) else item] = work
    return found
