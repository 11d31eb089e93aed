"""Backbones whose step runs on into the next one, while that of another begins.

In a plan with *carried* actions each backbone makes its own optimizer step when its own last backward has ended. A row
is what a rank does from one end of the step to the next: all actions of the backbone that carries none, and of each of
the others the last ones of the step before, then the first ones of this step. Each action is there once, so a row is a
permutation of an ordinary one; what differs is which step its data and its weights are of.

Nothing of this step is needed by what is carried from the one before, so rows can be run in parts too: a first call
without the carried actions, any number of whole ones, and what is left at the end.

What this step sends to an action that the next one runs *lands* at the end of this step, so that no message is under
way between two of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import accumulate

from deepspeed_pulse.ir.fill import Fill, FrozenRun
from deepspeed_pulse.ir.keys import key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.program import Message, Program, Step, lower, senders
from deepspeed_pulse.ir.schedule import Action, Op, Schedule


class Part(enum.Enum):
    """What of the rows runs."""

    WHOLE = "whole"
    FIRST = "first"
    """Where no step was before: without what is carried."""
    LAST = "last"
    """Where no step follows: only what is carried."""


def carried_actions(plan: Plan) -> frozenset[Action]:
    """The actions of a plan that are the previous step's; empty where backbones end their steps together."""
    found: list[Action] = []
    for part in plan.backbones:
        for row, count in zip(plan.schedule, part.carried, strict=False):
            found += [action for action in row if part.stages[0] <= action.stage < part.stages[1]][:count]
    return frozenset(found)


def with_carried(plan: Plan, carried: Collection[Action]) -> Plan:
    """The plan, with so many actions carried, by rank and backbone; they are the first of their backbone there."""
    rows = [[action for action in row if action in carried] for row in plan.schedule]
    parts = []
    for part in plan.backbones:
        counts = tuple(sum(part.stages[0] <= action.stage < part.stages[1] for action in row) for row in rows)
        parts.append(replace(part, carried=counts if any(counts) else ()))
    return replace(plan, backbones=tuple(parts))


def isolated(plan: Plan) -> Plan:
    """The plan of one step with nothing before and after it: what it carries over comes last."""
    carried = carried_actions(plan)
    return replace(with_carried(plan, ()), schedule=in_step_order(plan.schedule, carried)) if carried else plan


def in_step_order(schedule: Schedule, carried: Collection[Action]) -> Schedule:
    """Rows with what is carried at their ends."""
    return tuple((*(a for a in row if a not in carried), *(a for a in row if a in carried)) for row in schedule)


def program_of(plan: Plan, part: Part = Part.WHOLE) -> Program:
    """Steps of every rank of a plan, and where messages land."""
    carried = carried_actions(plan)
    return rolling(lower(plan), carried, plan.placement, part) if carried else lower(plan)


def fill_of(plan: Plan, part: Part = Part.WHOLE) -> Fill | None:
    """The frozen work of a part of the rows, at places among its actions; the last part has none.

    All of it is for the step after the row, also where the row is the first.
    """
    carried = carried_actions(plan)
    if plan.fill is None or not carried or part is Part.WHOLE:
        return plan.fill
    if part is Part.LAST:
        return None
    counts = [list(accumulate((a not in carried for a in row), initial=0)) for row in plan.schedule]
    rows = (
        tuple(replace(filling, position=count[filling.position]) for filling in row)
        for row, count in zip(plan.fill.rows, counts, strict=True)
    )
    return replace(plan.fill, rows=tuple(rows))


def rolling(program: Program, carried: Collection[Action], placement: Placement, part: Part = Part.WHOLE) -> Program:
    """A program of which some actions are the previous step's."""
    crossing = _crossing(program, carried)
    late = {key_of(action) for action in carried}

    def step_of(step: Step) -> Step:
        if step.action not in carried:
            return step
        needs = tuple(key for key in step.needs if key in late)
        return replace(step, receives=tuple(m for m in step.receives if m not in crossing), needs=needs)

    rows = []
    for rank, row in enumerate(program):
        wanted = [step_of(s) for s in row if _runs(s.action in carried, part)]
        landing = tuple(message for message in crossing if placement[message.target_stage] == rank)
        if landing and part is not Part.LAST:
            action = Action(placement.stages_of(rank)[0], Op.LANDING, 0)
            wanted.append(Step(action, landing, (), needs=senders(landing)))
        rows.append(tuple(wanted))
    return tuple(rows)


def _runs(is_carried: bool, part: Part) -> bool:
    return part is Part.WHOLE or is_carried == (part is Part.LAST)


def _crossing(program: Program, carried: Collection[Action]) -> dict[Message, None]:
    """Messages that one step sends and the next one reads, in the senders' order."""
    read = {message for row in program for step in row if step.action in carried for message in step.receives}
    sent = (m for row in program for step in row if step.action not in carried for m in step.sends)
    return {message: None for message in sent if message in read}


def updates_at(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Of each backbone that carries actions, per rank the number of its row's steps after which it makes its own.

    The first place by which the backbone's carried actions have ended on all ranks. They may meet there, for a norm
    over all of them: nothing before it waits for anything after it. Backbones come in the order in which ranks meet.
    """
    program, carried = program_of(plan), carried_actions(plan)
    found: dict[int, tuple[int, ...]] = {}
    for index, part in enumerate(plan.backbones):
        if part.carried:
            mine = [a for a in carried if plan.placement.backbone_of(a.stage) == index]
            found[index] = _reach(program, mine)
    nested, before = {}, (0,) * len(program)
    for index in sorted(found, key=lambda index: sum(found[index])):
        nested[index] = before = tuple(map(max, before, found[index]))
    return nested


def _reach(program: Program, wanted: Collection[Action]) -> tuple[int, ...]:
    """Per rank, how many of its steps come before some actions, those included."""
    place = {step.action: (rank, at) for rank, row in enumerate(program) for at, step in enumerate(row)}
    givers = {key_of(action): where for action, where in place.items()}
    reached = [0] * len(program)
    waiting = [place[action] for action in wanted]
    while waiting:
        rank, at = waiting.pop()
        for step in program[rank][reached[rank] : at + 1]:
            waiting += [givers[key] for key in step.needs if key in givers]
        reached[rank] = max(reached[rank], at + 1)
    return tuple(reached)


def problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the carried actions of a plan whose isolated step is sound."""
    carried = carried_actions(plan)
    whole = lower(plan)
    late = {key_of(action): action for action in carried}
    for row in whole:
        for step in row:
            needed = [late[key] for key in step.needs if key in late]
            if step.action not in carried and needed:
                yield f"carried: {step.action} is this step's, but needs {needed[0]}, which the next step runs"
    if all(part.carried for part in plan.backbones):
        yield "carried: expected one backbone that carries nothing, whose actions begin and end with the step"


def meeting_problems(plan: Plan) -> Iterator[str]:
    """Where a backbone would begin its next step before all ranks have ended the one before.

    And frozen work before a place where ranks meet: it might wait for a result that another rank makes behind it.
    """
    carried = carried_actions(plan)
    for index, counts in updates_at(plan).items():
        for rank, count in enumerate(counts):
            own = [a for a in plan.schedule[rank][:count] if plan.placement.backbone_of(a.stage) == index]
            early = [action for action in own if action not in carried]
            if early:
                yield (
                    f"carried: rank {rank} runs {early[0]} of backbone {plan.backbones[index].name} before all ranks "
                    "have ended its step before"
                )
            fillings = () if plan.fill is None else plan.fill.rows[rank]
            before = [f.work for f in fillings if isinstance(f.work, FrozenRun) and f.position < count]
            if before:
                yield (
                    f"carried: rank {rank} encodes {before[0]} before all ranks have ended the step of backbone "
                    f"{plan.backbones[index].name} before"
                )
