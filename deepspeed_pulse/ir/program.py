"""What a Plan makes each rank do: every compute action with the messages before and after it.

The one lowering of simulator, validator and runtime, so that what is scored and checked is what runs.

* ``sFm`` needs the hidden state from stage s-1 of its backbone (a message when that stage is on another rank) and the
  named values that a route brings to stage s; it sends on to s+1 and along the routes' hops that leave from s.
* ``sEm`` runs the edges of ``sFm`` with messages of its own. What the last stage's gives, an estimate, goes to the
  first stage of each rank that reads it, for that stage's ``F``.
* ``sBm`` runs the same edges backwards: gradients come from where F sent to, and go to where F received from. All
  consumers of a value on a rank have run their backward by then, because the hop arrived for the first of them. Whether
  a value's gradient is sent at all (``requires_grad``) is agreed on by both ends when the value first travels.

A *channel* is a directed pair of ranks; its messages, forward and backward, are in the order in which the sender
produces them, at both ends (NCCL and HCCL ignore tags). The other way round the same two ranks have another channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from deepspeed_pulse.ir.conditioning import SelfConditioned
from deepspeed_pulse.ir.keys import Key, key_of, local_needs
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import GIVEN_BY, OP_RULES, Action, Direction, Op

HIDDEN = ""
"""Name of the hidden state in messages; named values have a name of their own."""


@dataclass(frozen=True, slots=True)
class Channel:
    """An ordered stream of messages from one pipeline rank to another; ``frozen``: of results of frozen parts."""

    source_rank: int
    target_rank: int
    frozen: bool = False


class Message(NamedTuple):
    """One tensor group on its way: from the end of ``source_stage``'s action to ``target_stage``'s.

    ``name`` is :data:`HIDDEN` or a named value's; a backward message carries its gradient. An extra forward sends to
    another one, or its estimate, by the name of its entry.
    """

    name: str
    direction: Direction
    source_stage: int
    target_stage: int
    microbatch: int

    @property
    def label(self) -> str:
        """``hidden``, ``hidden_grad``, ``value:NAME`` or ``value_grad:NAME``."""
        suffix = "_grad" if self.direction is Direction.BACKWARD else ""
        return f"hidden{suffix}" if self.name == HIDDEN else f"value{suffix}:{self.name}"

    @property
    def forward_edge(self) -> tuple[str, int, int]:
        """Name and stages (from, to) of the edge in forward direction, the same for value and gradient."""
        if self.direction is Direction.BACKWARD:
            return (self.name, self.target_stage, self.source_stage)
        return (self.name, self.source_stage, self.target_stage)

    @property
    def boundary(self) -> tuple[str, int, int, bool]:
        """The edge, and whether extra forwards cross it: there nothing wants a gradient."""
        return (*self.forward_edge, self.direction is Direction.EXTRA)


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a rank, the messages it waits for and the messages that leave when it ends.

    ``needs``: what must be given before it, by its messages' producers and by its own rank. ``takes``: extra forwards
    of its own rank whose estimate it reads; ``feeds``: forwards there that read its own.
    """

    action: Action
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    needs: tuple[Key, ...] = ()
    takes: tuple[Action, ...] = ()
    feeds: tuple[Action, ...] = ()


Program = tuple[tuple[Step, ...], ...]
"""Per rank, its steps in order."""


def channel_of(message: Message, placement: Sequence[int]) -> Channel:
    """The channel that a message takes; ``placement``: rank of each stage."""
    return Channel(placement[message.source_stage], placement[message.target_stage])


def senders(messages: Sequence[Message]) -> tuple[Key, ...]:
    """What must be given before messages leave."""
    return tuple((m.source_stage, GIVEN_BY[m.direction], m.microbatch) for m in messages)


class Lowering:
    """Messages of a plan's stages; :meth:`step` gives an action those that it waits for and sends.

    ``without_gradient``: named values for which nothing is sent back.
    """

    def __init__(self, plan: Plan, without_gradient: Collection[str] = ()) -> None:
        self._placement, self._without_gradient = plan.placement, without_gradient
        self._in: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self._out: dict[int, list[tuple[str, int]]] = defaultdict(list)
        hidden = [(HIDDEN, stage, following) for stage, following in plan.placement.hidden_edges]
        values = [(route.name, source, target) for route in plan.routes for source, target in route.hops]
        for name, source, target in hidden + values:
            self._out[source].append((name, target))
            self._in[target].append((name, source))
        self._estimates = [_Estimate(plan, one) for one in plan.conditioning]

    def step(self, action: Action) -> Step:
        """The step of an action of the plan."""
        found = self._plain(action)
        for estimate in self._estimates:
            found = estimate.added_to(found)
        own = (*local_needs(action, self._placement), *map(key_of, found.takes))
        return replace(found, needs=tuple(dict.fromkeys((*senders(found.receives), *own))))

    def _plain(self, action: Action) -> Step:
        stage, m = action.stage, action.microbatch
        way = OP_RULES[action.op].way
        if way is None:
            return Step(action, (), ())
        before, after = self._in[stage], self._out[stage]
        if way is Direction.BACKWARD:
            after, before = (
                [(name, other) for name, other in edges if name not in self._without_gradient]
                for edges in (before, after)
            )
        receives = tuple(Message(name, way, other, stage, m) for name, other in before)
        return Step(action, receives, tuple(Message(name, way, stage, other, m) for name, other in after))


class _Estimate:
    """Where the estimates of a backbone come from and go to."""

    def __init__(self, plan: Plan, conditioned: SelfConditioned) -> None:
        self._entry, self._microbatches = conditioned.entry, frozenset(conditioned.microbatches)
        self._source, readers = plan.estimate_stages(conditioned)
        mine = plan.placement[self._source]
        self._here = [stage for stage in readers if plan.placement[stage] == mine]
        self._away = [stage for stage in readers if plan.placement[stage] != mine]

    def added_to(self, step: Step) -> Step:
        action = step.action
        stage, m = action.stage, action.microbatch
        if m not in self._microbatches:
            return step
        if action.op is Op.EXTRA_FORWARD and stage == self._source:
            sends = tuple(Message(self._entry, Direction.EXTRA, stage, reader, m) for reader in self._away)
            feeds = tuple(Action(reader, Op.FORWARD, m) for reader in self._here)
            return replace(step, sends=(*step.sends, *sends), feeds=feeds)
        if action.op is Op.FORWARD and stage in self._here:
            return replace(step, takes=(*step.takes, Action(self._source, Op.EXTRA_FORWARD, m)))
        if action.op is Op.FORWARD and stage in self._away:
            arriving = Message(self._entry, Direction.EXTRA, self._source, stage, m)
            return replace(step, receives=(*step.receives, arriving))
        return step


def lower(plan: Plan) -> Program:
    """Steps of every rank of a plan."""
    lowering = Lowering(plan)
    return tuple(tuple(lowering.step(action) for action in row) for row in plan.schedule)
