"""Random valid plans for a layer list: random cuts, random orders, and the one worst for memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.keys import key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan, make_routes
from deepspeed_pulse.ir.program import Message, lower
from deepspeed_pulse.ir.schedule import SPLIT, WHOLE, Action, Op, Schedule


def random_plan(
    graph: Graph,
    seed: int,
    *,
    ranks: int,
    microbatches: int,
    greedy_forward: bool = False,
    placement: Sequence[int] | None = None,
    halves: float = 0.0,
) -> Plan:
    """A valid plan with random cuts and a random order.

    Args:
        greedy_forward: all forwards first.
        halves: share of the backwards that run as ``I`` and ``W``.
        placement: rank of each stage; left out, one or two waves.
    """
    source = random.Random(seed)
    if placement is None:
        placement = Placement.wave(ranks, source.choice([w for w in (1, 2) if 2 * ranks * w <= len(graph.layers)]))
    placement = tuple(placement)
    cuts = sorted(source.sample(range(1, len(graph.layers)), len(placement) - 1))
    bounds = (0, *cuts, len(graph.layers))
    unordered = Plan(
        pipeline_ranks=ranks,
        data_parallel=1,
        microbatches=microbatches,
        microbatch_size=2,
        boundaries=bounds,
        placement=placement,
        schedule=((),) * ranks,
        routes=make_routes(bounds, placement, graph.values),
    )
    schedule = random_order(unordered, source, greedy_forward, halves)
    return replace(unordered, schedule=schedule)


def random_order(plan: Plan, source: random.Random, greedy_forward: bool, halves: float = 0.0) -> Schedule:
    """Repeatedly let a random rank run a random action that is ready."""

    def actions(stage: int, microbatch: int) -> list[Action]:
        ops = SPLIT if halves and source.random() < halves else WHOLE
        return [Action(stage, op, microbatch) for op in ops]

    todo = {
        rank: [a for s in plan.stages_of(rank) for m in range(plan.microbatches) for a in actions(s, m)]
        for rank in range(plan.pipeline_ranks)
    }
    for stage, rank in enumerate(plan.placement):
        todo[rank] += [Action(stage, Op.EXTRA_FORWARD, m) for m in plan.extra_forwards(stage)]
    full = replace(plan, schedule=tuple(tuple(todo[rank]) for rank in sorted(todo)))
    steps = {step.action: step for row in lower(full) for step in row}
    rows: dict[int, list[Action]] = {rank: [] for rank in todo}
    arrived: set[Message] = set()
    given: set[object] = set()

    def ready(action: Action) -> bool:
        earlier = [Action(action.stage, action.op, m) for m in range(action.microbatch)]
        return (
            not any(other in todo[plan.placement[action.stage]] for other in earlier)
            and all(message in arrived for message in steps[action].receives)
            and all(need in given for need in steps[action].needs)
        )

    while any(todo.values()):
        choices = [(rank, action) for rank in todo for action in todo[rank] if ready(action)]
        if greedy_forward:
            choices = [c for c in choices if c[1].op is Op.FORWARD] or choices
        rank, action = source.choice(choices)
        rows[rank].append(action)
        todo[rank].remove(action)
        given.add(key_of(action))
        arrived.update(steps[action].sends)
    return tuple(tuple(rows[rank]) for rank in sorted(rows))


def peak_forwards(row: Sequence[Action]) -> int:
    """Most half-stages in flight at once on a rank."""
    live = most = 0
    for action in row:
        live += 1 if action.op is Op.FORWARD else -1
        most = max(most, live)
    return most
