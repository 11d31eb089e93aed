"""Exact order of actions where the model of all of them is small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed_pulse.ir.schedule import Action, Schedule
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.search.net import Net
from deepspeed_pulse.planner.search.order_model import OrderModel


@dataclass(frozen=True, kw_only=True)
class Solved:
    """An order per rank, and a makespan (ms) that no order beats as far as the solver could prove."""

    schedule: Schedule
    bound_ms: float


def count_pairs(problem: Problem, microbatches: int) -> int:
    """Binaries of the model before time windows remove some."""
    per_rank = (len(problem.plan.stages_of(rank)) for rank in range(problem.num_ranks))
    open_pairs = 0
    for held in per_rank:
        actions = 2 * held * microbatches
        open_pairs += math.comb(actions, 2) - 2 * held * math.comb(microbatches, 2)
    return open_pairs


def whole_model(problem: Problem, upper_ms: float) -> OrderModel:
    """The model of all actions; messages follow one another only within an action."""
    net = Net(problem, problem.plan.microbatches, queues=False)
    nodes, nothing = net.in_any_order(), dict.fromkeys(range(net.num_actions), 0.0)
    return OrderModel(net, nodes, nothing, nothing, upper_ms)


def solve_order(
    problem: Problem, incumbent: Mapping[Action, float], upper_ms: float, *, seconds: float, seed: int
) -> Solved | None:
    """Best order that HiGHS finds within ``seconds``; None when it finds none. ``incumbent``: known starts, ms."""
    model = whole_model(problem, upper_ms)
    net = model.net
    program = model.program(
        {node: incumbent[action] for action, node in net.index.items()},
        random_seed=seed,
        time_limit=float(seconds),
        mip_rel_gap=1e-9,
        mip_abs_gap=1e-9 * max(1.0, upper_ms),
    )
    values = program.solve()
    if values is None:
        return None
    value = dict(zip(model.nodes, values, strict=False))
    place = {node: at for at, node in enumerate(model.nodes)}
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for node in sorted(model.nodes, key=lambda node: (value[node], place[node])):
        rows[net.machine[node]].append(node)
    info = program.solver.getInfo()
    bound = info.mip_dual_bound if model.pairs else info.objective_function_value
    return Solved(schedule=net.schedule(rows), bound_ms=float(bound) if math.isfinite(bound) else 0.0)
