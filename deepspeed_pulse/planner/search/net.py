"""A problem as arrays of integers: orders evaluated as longest paths, many thousands a second.

Nodes are actions; where messages may queue, messages are nodes too, in the order their senders run. An order's times
are the simulator's, but that gradients do not hold up messages; its score still comes from the simulator alone.

Where halves of a backward take longer than a whole one, both are nodes, and an order has one or the other. What an
order lacks is never over and never begins: its ``end`` and ``reach`` are minus infinity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from deepspeed_pulse.ir.schedule import FORWARDS, GIVEN_BY, OP_RULES, SPLIT, WHOLE, Action, Op, Schedule
from deepspeed_pulse.planner.bounds import CriticalPaths
from deepspeed_pulse.planner.links import Port
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.halves import halves_cost, in_halves

Rows = list[list[int]]
"""Per rank, nodes in order."""

Arc = tuple[int, float]
"""Another node, and the ms from the end of the earlier to the start of the later."""


class Net:
    """Durations, arcs and machines. Ranks are machines 0..P-1, ports follow.

    Args:
        split: backward runs as ``I`` and ``W``, or whole, where that is shorter.
        finish_ms: by the op of a stage's last backward, per stage, ms that pass after it (gradient reduction).
        queues: messages are nodes; None: where those of one action may wait for those of another.
    """

    def __init__(
        self,
        problem: Problem,
        microbatches: int,
        *,
        split: bool = False,
        finish_ms: Mapping[Op, Sequence[float]] | None = None,
        queues: bool | None = None,
    ) -> None:
        self.problem, self.microbatches, self.split = problem, microbatches, split
        self.ops = SPLIT if split else WHOLE
        self.both = split and halves_cost(problem)
        """Backwards may be whole and in halves."""
        ops = (*self.ops, Op.BACKWARD) if self.both else self.ops
        stages = range(problem.num_stages)
        self.actions = [Action(s, op, m) for op in ops for s in stages for m in range(microbatches)]
        self.actions += problem.extra_actions
        kinds = [OP_RULES[op].gives for op in (*self.ops, Op.EXTRA_FORWARD)]
        self.column = [kinds.index(OP_RULES[a.op].gives) * problem.num_stages + a.stage for a in self.actions]
        """Nodes of one stage and of ops that give the same stay in order."""
        self.index = {action: node for node, action in enumerate(self.actions)}
        self.num_actions = len(self.actions)
        self.duration = [problem.duration_ms(a) for a in self.actions]
        self.machine = [problem.placement[a.stage] for a in self.actions]
        after = finish_ms or {}
        self.finish = [after[a.op][a.stage] if a.op in after else 0.0 for a in self.actions]
        self.before: list[list[Arc]] = [[] for _ in self.actions]
        self.after: list[list[Arc]] = [[] for _ in self.actions]
        self.message_nodes: dict[int, list[int]] = {}
        """Messages of an action where they are nodes, in the order they leave."""
        self.queues = _may_queue(problem, self.actions) if queues is None else queues
        self._arcs()

    def _arcs(self) -> None:
        delay = {} if self.queues else _delays(self.problem, self.split)
        givers = {"F": [Op.FORWARD], "B": self._alike(self.ops[1]), "E": [Op.EXTRA_FORWARD]}
        for node, action in enumerate(self.actions):
            for stage, kind, m in self.problem.step(action).needs:
                if not self.queues or self.problem.placement[stage] == self.problem.placement[action.stage]:
                    gap = delay.get((stage, kind, action.stage), 0.0)
                    for op in givers[kind]:
                        self._arc(self.index[Action(stage, op, m)], node, gap)
        machines: dict[Port, int] = {}
        for node in range(self.num_actions if self.queues else 0):
            self._messages(node, machines)

    def _alike(self, op: Op) -> list[Op]:
        """The ops of which an order has one, or two halves: they wait for the same, and give the same."""
        return [Op.INPUT_GRAD, Op.BACKWARD] if self.both and op in (Op.INPUT_GRAD, Op.BACKWARD) else [op]

    def _arc(self, source: int, target: int, gap: float) -> None:
        self.after[source].append((target, gap))
        self.before[target].append((source, gap))

    def _messages(self, node: int, machines: dict[Port, int]) -> None:
        action = self.actions[node]
        for message in self.problem.step(action).sends:
            way, sent = self.problem.way(message), len(self.duration)
            self.duration.append(way.transfer_ms)
            self.machine.append(machines.setdefault(way.port, self.problem.num_ranks + len(machines)))
            self.column.append(-1)
            self.finish.append(0.0)
            self.before.append([])
            self.after.append([])
            self._arc(node, sent, 0.0)
            reader = self.problem.reader_of(message, action.op)
            for op in self._alike(reader.op):
                self._arc(sent, self.index[reader._replace(op=op)], way.latency_ms)
            self.message_nodes.setdefault(node, []).append(sent)

    def rows(self, schedule: Schedule) -> Rows:
        apart = in_halves(schedule) if self.split and not self.both else schedule
        return [[self.index[action] for action in row] for row in apart]

    def schedule(self, rows: Rows) -> Schedule:
        return tuple(tuple(self.actions[node] for node in row) for row in rows)

    def _machine_chains(self, chains: Rows) -> tuple[list[int], list[int], list[int]]:
        """Per node, what runs before and after it on its machine (-1: nothing); and open predecessors.

        What the order lacks waits for one more than there are.
        """
        size = len(self.duration)
        previous, following = [-1] * size, [-1] * size
        for row in chains:
            for last, node in pairwise(row):
                following[last], previous[node] = node, last
        missing = [len(arcs) for arcs in self.before]
        for node, other in enumerate(previous):
            if other >= 0:
                missing[node] += 1
        if self.both:
            self._skip_the_lacking(chains, missing)
        return previous, following, missing

    def _skip_the_lacking(self, chains: Rows, missing: list[int]) -> None:
        lacking = set(range(len(self.duration))).difference(*chains)
        for node in lacking:
            missing[node] += 1
            for other, _ in self.after[node]:
                missing[other] -= 1

    def _message_rows(self, rows: Rows) -> Rows:
        chains: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            for node in row:
                for sent in self.message_nodes.get(node, ()):
                    chains[self.machine[sent]].append(sent)
        return list(chains.values())

    def in_any_order(self) -> list[int]:
        """Forwards and whole backwards in an order in which they can run: stage by stage, and back."""

        def place(node: int) -> tuple[int, int, int]:
            action = self.actions[node]
            forward = action.op in FORWARDS
            turn = (Op.EXTRA_FORWARD, Op.FORWARD).index(action.op) if forward else 2
            return turn, action.stage if forward else -action.stage, action.microbatch

        return sorted(range(self.num_actions), key=place)

    def chained(self, rows: Rows) -> tuple[list[int], list[int], list[int]] | None:
        """A topological order, and each node's neighbours on its machine; None when the order deadlocks."""
        chains = [*rows, *self._message_rows(rows)] if self.queues else rows
        previous, following, missing = self._machine_chains(chains)
        order = [node for node, count in enumerate(missing) if count == 0]
        for node in order:
            for other in (following[node], *(after for after, _ in self.after[node])):
                if other >= 0:
                    missing[other] -= 1
                    if not missing[other]:
                        order.append(other)
        return (order, previous, following) if len(order) == sum(map(len, chains)) else None


def _delays(problem: Problem, split: bool) -> dict[tuple[int, str, int], float]:
    """ms from an action's end to the arrival of its last message at a stage: (source stage, what is given, target)."""
    delays: dict[tuple[int, str, int], float] = {}
    for message, delay in CriticalPaths(problem, split=split).delays.items():
        key = (message.source_stage, GIVEN_BY[message.direction], message.target_stage)
        delays[key] = max(delays.get(key, 0.0), delay)
    return delays


def _may_queue(problem: Problem, actions: list[Action]) -> bool:
    """Whether messages of one action can still be leaving when those of the next are there."""
    sent: dict[Port, list[tuple[float, float]]] = defaultdict(list)
    for action in (a for a in actions if a.microbatch == 0):
        used: dict[Port, float] = defaultdict(float)
        for message in problem.step(action).sends:
            way = problem.way(message)
            used[way.port] += way.transfer_ms
        for port, transfer in used.items():
            sent[port].append((transfer, problem.duration_ms(action)))
    return any(max(t for t, _ in row) > min(d for _, d in row) for row in sent.values())
