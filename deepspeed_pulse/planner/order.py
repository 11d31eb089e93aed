"""In which order the actions of all ranks can run, times aside; shared by the simulator and the validator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_pulse.ir.program import Direction, Program, Step
from deepspeed_pulse.ir.schedule import Action, Op

Key = tuple[int, str, int]
"""(stage, "F", "B" or "W", microbatch): what others can wait for. ``B`` and ``I`` both give "B"."""

_KIND = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.INPUT_GRAD: "B", Op.WEIGHT_GRAD: "W"}


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that cannot go on: its next action and what that waits for."""

    rank: int
    action: Action
    waits_for: tuple[Key, ...]

    def describe(self, placement: Sequence[int]) -> str:
        """``rank 1 is stuck at 1B0, which waits for 2B0 of rank 2``."""
        missing = " and ".join(
            f"{s}{k}{m}" + (f" of rank {placement[s]}" if s < len(placement) else "") for s, k, m in self.waits_for
        )
        return f"rank {self.rank} is stuck at {self.action}, which waits for {missing}"


def key_of(action: Action) -> Key:
    return (action.stage, _KIND[action.op], action.microbatch)


def needs(step: Step, placement: Sequence[int]) -> tuple[Key, ...]:
    """Keys that must be done before a step: its messages' producers, and what its own rank hands over."""
    stage, m = step.action.stage, step.action.microbatch
    kind = _KIND[step.action.op]
    found = [(msg.source_stage, "F" if msg.direction is Direction.FORWARD else "B", m) for msg in step.receives]
    if kind == "W":
        found.append((stage, "B", m))
    elif kind == "B":
        found.append((stage, "F", m))
        if stage + 1 < len(placement) and placement[stage + 1] == placement[stage]:
            found.append((stage + 1, "B", m))
    elif 0 < stage < len(placement) and placement[stage - 1] == placement[stage]:
        found.append((stage - 1, "F", m))
    return tuple(dict.fromkeys(found))


def execution_order(program: Program, placement: Sequence[int]) -> tuple[list[tuple[int, Step]], tuple[Stuck, ...]]:
    """All steps in an order that respects rows and dependencies, and the ranks that cannot reach their end.

    The second part is empty exactly when the order does not deadlock. A rank's steps come in its own order.
    """
    done: set[Key] = set()
    position = [0] * len(program)
    order: list[tuple[int, Step]] = []
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(program):
            while position[rank] < len(row):
                step = row[position[rank]]
                if any(key not in done for key in needs(step, placement)):
                    break
                done.add(key_of(step.action))
                order.append((rank, step))
                position[rank] += 1
                progress = True
    return order, tuple(
        Stuck(rank, row[at].action, tuple(key for key in needs(row[at], placement) if key not in done))
        for rank, row in enumerate(program)
        if (at := position[rank]) < len(row)
    )
