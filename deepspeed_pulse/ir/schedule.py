"""Actions and their order: the small language shared by plans, errors, logs, tests and pictures.

An action is text ``<stage><op><microbatch>``, for example ``2F0``: stage 2, forward, microbatch 0.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_pulse.errors import FileError


class Op(enum.Enum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    EXTRA_FORWARD = "E"
    """Without gradient, before the forward of its microbatch, which reads what is made of the result."""
    LANDING = "L"
    """Takes messages that are read in the next step. In programs only, after the last action of a rank."""
    __hash__ = object.__hash__  # members are singletons; enum's own hash is slow, and actions are hashed all the time


class Direction(enum.Enum):
    """Where messages go: to later stages, or gradients to earlier ones."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EXTRA = "extra"
    """What extra forwards send: to later stages, and from the last one what the real forward reads."""
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class OpRule:
    """What holds for every action of an op.

    Attributes:
        gives: what others call its result: ``B`` and ``I`` give the same, so nothing has to know which of them runs.
        after: the op of its stage and microbatch that must have run.
        way: of its messages, which its neighbour on the same rank is spared; None: it has none.
        units: time it takes where all stages are alike, a forward 1.
    """

    gives: str
    after: Op | None
    way: Direction | None
    units: int


OP_RULES = {
    Op.FORWARD: OpRule("F", None, Direction.FORWARD, 1),
    Op.BACKWARD: OpRule("B", Op.FORWARD, Direction.BACKWARD, 2),
    Op.INPUT_GRAD: OpRule("B", Op.FORWARD, Direction.BACKWARD, 1),
    Op.WEIGHT_GRAD: OpRule("W", Op.INPUT_GRAD, None, 1),
    Op.EXTRA_FORWARD: OpRule("E", None, Direction.EXTRA, 1),
    Op.LANDING: OpRule("L", None, None, 0),
}
GIVEN_BY = {Direction.FORWARD: "F", Direction.BACKWARD: "B", Direction.EXTRA: "E"}
"""What must be given before a message that goes that way leaves."""

FORWARDS = (Op.FORWARD, Op.EXTRA_FORWARD)
WHOLE, SPLIT = (Op.FORWARD, Op.BACKWARD), (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
"""The ops of a stage and microbatch, in order; before them :attr:`Op.EXTRA_FORWARD` where it is self-conditioned."""

_LETTERS = " ".join(op.value for op in Op if op is not Op.LANDING)
ACTION = re.compile(rf"(0|[1-9][0-9]{{0,8}})([{_LETTERS.replace(' ', '')}])(0|[1-9][0-9]{{0,8}})")
"""Stage, operation, microbatch."""


class Action(NamedTuple):
    """One op of one stage on one microbatch; a tuple, as planning makes and hashes millions of them."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of ``str``: ``Action.parse(str(a)) == a`` and ``str(Action.parse(t)) == t``."""
        match = ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise FileError(f"expected an action such as '2F0' (stage, one of {_LETTERS}, microbatch), found {text!r}")
        return cls(int(match[1]), Op(match[2]), int(match[3]))


def forward(stage: int, microbatch: int) -> Action:
    return Action(stage, Op.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    return Action(stage, Op.BACKWARD, microbatch)


Schedule = tuple[tuple[Action, ...], ...]
"""Per rank, its compute actions in order."""


def format_schedule(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """One text per action, one row per rank."""
    return tuple(tuple(str(action) for action in row) for row in schedule)
