"""Messages seen from the channels: their order, how many buffers they need, when a send is over.

Everything here follows from the program alone, so both ends of a channel agree without talking.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from deepspeed_pulse.errors import PlanError
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import Channel, Message, Program, channel_of, lower
from deepspeed_pulse.ir.schedule import Action, Op

MIN_SLOTS = 2
POSTED_AHEAD = 2
"""How long before its message leaves a receive is posted, in the time of a forward: as long as a backward takes.

gloo sends nothing before it knows that the receive is posted, and that word queues behind what the receiver sends.
"""
_LAST = 1 << 60
_UNIT_TIME = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.INPUT_GRAD: 1, Op.WEIGHT_GRAD: 1}


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


def make_traffic(plan: Plan) -> Traffic:
    """Analyse a plan's messages. Raises PlanError when the order of actions deadlocks."""
    program = lower(plan)
    sent_at, used_at = _places(program)
    channels, slots = receive_slots(program, plan.placement)
    return Traffic(
        program=program,
        channels=channels,
        slots=slots,
        releases=tuple(_releases(rank, program, sent_at, used_at) for rank in range(len(program))),
    )


_Places = dict[Message, tuple[int, int]]
"""Rank and position of the step that sends a message, or receives it."""


def _places(program: Program) -> tuple[_Places, _Places]:
    sent_at = {m: (rank, i) for rank, row in enumerate(program) for i, step in enumerate(row) for m in step.sends}
    used_at = {m: (rank, i) for rank, row in enumerate(program) for i, step in enumerate(row) for m in step.receives}
    if sent_at.keys() != used_at.keys():
        odd = next(iter(sent_at.keys() ^ used_at.keys()))
        raise PlanError(
            f"the schedule lacks an action: {odd.label} of microbatch {odd.microbatch} from stage "
            f"{odd.source_stage} to stage {odd.target_stage} has only one end"
        )
    return sent_at, used_at


def receive_slots(
    program: Program, placement: Sequence[int]
) -> tuple[dict[Channel, tuple[Message, ...]], dict[Channel, int]]:
    """Messages of each channel in the order in which they are sent, and its receive buffers (:class:`Traffic`).

    Raises:
        PlanError: a message has only one end, or the order of actions deadlocks.
    """
    sent_at, used_at = _places(program)
    channels: dict[Channel, list[Message]] = defaultdict(list)
    for message in sent_at:
        channels[channel_of(message, placement)].append(message)
    starts = unit_clock(program, placement)
    ordered = {channel: tuple(messages) for channel, messages in channels.items()}
    return ordered, {c: _slots(messages, program, starts, sent_at, used_at) for c, messages in ordered.items()}


def unit_clock(program: Program, placement: Sequence[int]) -> list[list[int]]:
    """Start of every step when forward takes 1, backward 2 and messages nothing.

    Raises:
        PlanError: the order deadlocks; shows the action every rank is stuck at and what it waits for.
    """
    arrived: dict[Message, int] = {}
    finished: dict[tuple[int, Op, int], int] = {}
    starts: list[list[int]] = [[] for _ in program]
    free = [0] * len(program)
    split = split_stages(step.action for row in program for step in row)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(program):
            while len(starts[rank]) < len(row):
                step = row[len(starts[rank])]
                waits = [arrived.get(m) for m in step.receives] + [
                    finished.get(key) for key in local_needs(step.action, placement, split)
                ]
                if any(time is None for time in waits):
                    break
                start = max([free[rank], *(time for time in waits if time is not None)])
                free[rank] = start + _UNIT_TIME[step.action.op]
                starts[rank].append(start)
                finished[step.action.stage, step.action.op, step.action.microbatch] = free[rank]
                arrived.update(dict.fromkeys(step.sends, free[rank]))
                progress = True
    stuck = [rank for rank, row in enumerate(program) if len(starts[rank]) < len(row)]
    if stuck:
        raise PlanError(_describe_deadlock(program, placement, starts, stuck, arrived, finished))
    return starts


def split_stages(actions: Iterable[Action]) -> frozenset[int]:
    """Stages whose backward runs as ``I`` and ``W``."""
    return frozenset(action.stage for action in actions if action.op is Op.INPUT_GRAD)


def local_needs(action: Action, placement: Sequence[int], split: Collection[int]) -> list[tuple[int, Op, int]]:
    """Actions on the same rank that must be over before this one, as (stage, op, microbatch).

    ``split``: stages whose backward runs as ``I`` and ``W``.
    """
    stage, op, microbatch = action.stage, action.op, action.microbatch
    needs: list[tuple[int, Op, int]] = []
    if op is Op.FORWARD:
        if stage > 0 and placement[stage - 1] == placement[stage]:
            needs.append((stage - 1, Op.FORWARD, microbatch))
        return needs
    if op is Op.WEIGHT_GRAD:
        return [(stage, Op.INPUT_GRAD, microbatch)]
    needs.append((stage, Op.FORWARD, microbatch))
    if stage + 1 < len(placement) and placement[stage + 1] == placement[stage]:
        needs.append((stage + 1, Op.INPUT_GRAD if stage + 1 in split else Op.BACKWARD, microbatch))
    return needs


def _describe_deadlock(
    program: Program,
    placement: Sequence[int],
    starts: list[list[int]],
    stuck: list[int],
    arrived: dict[Message, int],
    finished: dict[tuple[int, Op, int], int],
) -> str:
    split = split_stages(step.action for row in program for step in row)
    lines = []
    for rank in stuck:
        step = program[rank][len(starts[rank])]
        action = step.action
        waits = [f"{m.label} from stage {m.source_stage}" for m in step.receives if m not in arrived]
        waits += [
            f"{s}{op.value}{m}" for s, op, m in local_needs(action, placement, split) if (s, op, m) not in finished
        ]
        lines.append(f"rank {rank} is stuck at {action}, its action {len(starts[rank])}: waits for {', '.join(waits)}")
    return "the order of actions deadlocks; reorder the schedule:\n  " + "\n  ".join(lines)


def _slots(
    messages: tuple[Message, ...],
    program: Program,
    starts: list[list[int]],
    sent_at: dict[Message, tuple[int, int]],
    used_at: dict[Message, tuple[int, int]],
) -> int:
    """Of one channel, in unit time; at least ``MIN_SLOTS`` where there are as many messages."""
    due, used = [], []
    for message in messages:
        rank, i = sent_at[message]
        due.append(starts[rank][i] + _UNIT_TIME[program[rank][i].action.op] - POSTED_AHEAD)
        target, j = used_at[message]
        used.append((starts[target][j], j, program[target][j].receives.index(message)))
    return max(fewest_slots(due, used), min(MIN_SLOTS, len(messages)))


def fewest_slots(due: Sequence[float], used: Sequence[tuple[float, int, int]]) -> int:
    """Buffers with which every receive of a channel is posted when it is due.

    Receives are posted in the channel's order, one for each buffer and one more whenever a message is consumed: with n
    buffers, message k can arrive once k + 1 - n of the messages before it have been consumed.

    Args:
        due: when each message's receive is to be posted, in the channel's order.
        used: when each is consumed, with the receiver's action and the position there.
    """
    ended: list[tuple[float, int, int]] = []
    most = 1
    for time, consumed in zip(due, used, strict=True):
        most = max(most, len(ended) + 1 - bisect_right(ended, min((time, _LAST, _LAST), consumed)))
        insort(ended, consumed)
    return most


def _releases(
    rank: int,
    program: Program,
    sent_at: dict[Message, tuple[int, int]],
    used_at: dict[Message, tuple[int, int]],
) -> tuple[tuple[Message, ...], ...]:
    found: list[list[Message]] = [[] for _ in program[rank]]
    arrivals: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for i, step in enumerate(program[rank]):
        for message in step.receives:
            peer, sent = sent_at[message]
            arrivals[peer].append((sent, i))
    earliest: dict[int, tuple[list[int], list[int]]] = {}
    for peer, pairs in arrivals.items():
        pairs.sort()
        best = [i for _, i in pairs]
        for k in range(len(best) - 2, -1, -1):
            best[k] = min(best[k], best[k + 1])
        earliest[peer] = ([sent for sent, _ in pairs], best)
    for step in program[rank]:
        for message in step.sends:
            peer, used = used_at[message]
            sent_positions, best = earliest.get(peer, ([], []))
            k = bisect_left(sent_positions, used)
            if k < len(best):
                found[best[k]].append(message)
    return tuple(tuple(messages) for messages in found)
