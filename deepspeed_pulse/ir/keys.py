"""What an action gives, and what it takes over from others of its own rank."""

from __future__ import annotations

from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import OP_RULES, SPLIT, WHOLE, Action, Direction

Key = tuple[int, str, int]
"""(stage, what the op gives, microbatch): what an action gives."""


def key_of(action: Action) -> Key:
    return (action.stage, OP_RULES[action.op].gives, action.microbatch)


def local_needs(action: Action, placement: Placement) -> list[Key]:
    """What an action takes over from others of its own rank, estimates apart."""
    rule = OP_RULES[action.op]
    found = [] if rule.after is None else [(action.stage, OP_RULES[rule.after].gives, action.microbatch)]
    before = _neighbour(action.stage, rule.way, placement, giving=True)
    if before is not None and placement[before] == placement[action.stage]:
        found.append((before, rule.gives, action.microbatch))
    return found


def local_dependents(action: Action, placement: Placement, *, split: bool) -> list[Action]:
    """The actions whose :func:`local_needs` name this one. ``split``: backward runs as ``I`` and ``W``."""
    ops = SPLIT if split else WHOLE
    found = [Action(action.stage, op, action.microbatch) for op in ops if OP_RULES[op].after is action.op]
    following = _neighbour(action.stage, OP_RULES[action.op].way, placement, giving=False)
    if following is not None and placement[following] == placement[action.stage]:
        found.append(Action(following, action.op, action.microbatch))
    return found


def _neighbour(stage: int, way: Direction | None, placement: Placement, *, giving: bool) -> int | None:
    """The stage that gives an action of this one what comes that way, or the one that takes what it gives.

    A stage that the placement does not have, as a file may name it, has none.
    """
    if way is None or stage >= len(placement):
        return None
    return placement.after(stage) if giving == (way is Direction.BACKWARD) else placement.before(stage)
