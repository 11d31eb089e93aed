"""Deadlock freedom when nothing is buffered: a message moves only once its receive is posted.

A model of what a rank does, message by message, without times:

* it posts receives in the channel's order, at most ``slots`` that are not consumed yet, and one more after each
  message it consumes (or none ahead of need: the first step, while shapes are still being agreed on; a step in which
  some shapes are known lies between the two, and a receive posted earlier never hurts);
* before an action it consumes the action's messages in order, then waits for those of its own sends that its buffers
  can be reused after (``releases``); after the action it starts the sends and does not wait for them;
* message k of a channel has moved when k + 1 were sent and k + 1 receives were posted, as backends without tags do it;
* at the end it waits for all its sends.

Whatever order the ranks proceed in, a rank that can go on stays able to: so one run of the model decides for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from deepspeed_pulse.ir.channels import Traffic
from deepspeed_pulse.ir.keys import Key, key_of, local_needs
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import Channel, Message

Place = tuple["_Stream", int]


@dataclass
class _Stream:
    """One channel: how many messages were sent, how many receives posted."""

    channel: Channel
    messages: tuple[Message, ...]
    slots: int
    sent: int = 0
    posted: int = 0
    consumed: int = 0

    def moved(self, k: int) -> bool:
        return k < min(self.sent, self.posted)

    def post_ahead(self) -> None:
        """As the slots allow."""
        self.posted = max(self.posted, min(self.consumed + self.slots, len(self.messages)))


@dataclass
class _Rank:
    """Where a rank is: its action, and how many of that action's messages it has consumed."""

    position: int = 0
    consumed: int = 0
    done: set[Key] = field(default_factory=set)


def rendezvous_problems(plan: Plan, traffic: Traffic) -> list[str]:
    """What never completes, one line each; empty for every plan that runs on any backend."""
    found = [line for ahead in (True, False) for line in _Model(plan, traffic, ahead=ahead).run()]
    return list(dict.fromkeys(found))


class _Model:
    """All ranks and channels of a plan."""

    def __init__(self, plan: Plan, traffic: Traffic, *, ahead: bool) -> None:
        self.plan, self.traffic, self.ahead = plan, traffic, ahead
        self.streams = [_Stream(c, messages, traffic.slots[c]) for c, messages in traffic.channels.items()]
        self.place: dict[Message, Place] = {m: (s, k) for s in self.streams for k, m in enumerate(s.messages)}
        self.ranks = [_Rank() for _ in traffic.program]
        for stream in self.streams if ahead else ():
            stream.post_ahead()

    def run(self) -> Iterator[str]:
        """Let every rank go as far as it can until none can; yield what is left."""
        while sum(self._advance(rank) for rank in range(len(self.ranks))):
            pass
        for rank, at in enumerate(self.ranks):
            if at.position < len(self.traffic.program[rank]):
                yield f"deadlock under unbuffered sends: {self._describe(rank)}"
        for stream in self.streams:
            for k in range(stream.posted, stream.sent):
                yield f"deadlock under unbuffered sends: {_name(stream, k)} is sent and never received"

    def _advance(self, rank: int) -> bool:
        at, program = self.ranks[rank], self.traffic.program[rank]
        moved = False
        while at.position < len(program):
            step = program[at.position]
            while at.consumed < len(step.receives) and self._consume(step.receives[at.consumed]):
                at.consumed += 1
                moved = True
            if at.consumed < len(step.receives) or self._waits(rank):
                break
            for message in step.sends:
                self.place[message][0].sent += 1
            at.done.add(key_of(step.action))
            at.position, at.consumed, moved = at.position + 1, 0, True
        return moved

    def _consume(self, message: Message) -> bool:
        stream, k = self.place[message]
        if not self.ahead:
            stream.posted = max(stream.posted, k + 1)
        if not stream.moved(k):
            return False
        stream.consumed += 1
        if self.ahead:
            stream.post_ahead()
        return True

    def _waits(self, rank: int) -> bool:
        """For a release, or for an action of its own that comes later."""
        at = self.ranks[rank]
        step = self.traffic.program[rank][at.position]
        own = [*local_needs(step.action, self.plan.placement), *map(key_of, step.takes)]
        return bool(self._held(rank)) or any(n not in at.done for n in own if n in step.needs)

    def _held(self, rank: int) -> list[Place]:
        """Sends of the rank that must have moved before its action, and have not."""
        released = self.traffic.releases[rank][self.ranks[rank].position]
        return [(stream, k) for stream, k in map(self.place.__getitem__, released) if not stream.moved(k)]

    def _describe(self, rank: int) -> str:
        at = self.ranks[rank]
        step = self.traffic.program[rank][at.position]
        if at.consumed < len(step.receives):
            stream, k = self.place[step.receives[at.consumed]]
            why = "was not sent" if k >= stream.sent else f"has no receive: {stream.slots} slots hold later messages"
            return f"rank {rank} is stuck at {step.action}: {_name(stream, k)} {why}"
        held = [_name(stream, k) for stream, k in self._held(rank)]
        return f"rank {rank} is stuck at {step.action}: " + (
            f"{' and '.join(held)} was never taken" if held else "an action it needs on its own rank comes later"
        )


def _name(stream: _Stream, k: int) -> str:
    message, channel = stream.messages[k], stream.channel
    return (
        f"{message.label} of microbatch {message.microbatch} from stage {message.source_stage} to stage "
        f"{message.target_stage} (rank {channel.source_rank} to {channel.target_rank})"
    )
