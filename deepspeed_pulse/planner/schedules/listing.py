"""List scheduling: build an order by letting, again and again, the earliest possible action start."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_pulse.errors import InfeasibleError
from deepspeed_pulse.ir.keys import Key, key_of
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.schedule import SPLIT, WHOLE, Action, Op, Schedule
from deepspeed_pulse.planner.links import Ports
from deepspeed_pulse.planner.problem import Problem

_SLACK = 1e-9


RankBy = Callable[[Action], tuple[float, ...]]
"""What an action is compared by with others of its rank that can start at one time."""


class Prefer(enum.Enum):
    """Which of two actions of a rank goes first when both can start at one time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FIRST_HOME = "forward, but the first microbatch before all others on a rank's later stages"
    """Its backward is the first that the innermost rank of a wave can run: until then forwards must keep it busy. So
    uniform stages in a V reach 6M + 3(P-1) half-stages (forward 1, backward 2) for every M >= 1.5 P."""
    ALL_FORWARDS = "all forwards before any backward"


class Extra(enum.Enum):
    """When extra forwards run that can start as early as other actions of their rank."""

    FIRST = -2
    LAST = 3


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A limit on what each rank keeps for backward: ``weights`` per stage and microbatch, ``limits`` per rank.

    Units are the caller's: bytes, or 1 per stage to count half-stages in flight.
    """

    weights: tuple[float, ...]
    limits: tuple[float, ...]
    unit: str = "bytes"


def list_schedule(
    problem: Problem,
    microbatches: int,
    *,
    prefer: Prefer | RankBy = Prefer.FORWARD,
    cap: Cap | None = None,
    split: bool = False,
    order: Schedule | None = None,
    extra: Extra = Extra.LAST,
) -> Schedule:
    """Earliest start first; among equals as ``prefer`` says, then the latest stage. Microbatches stay in order.

    ``prefer``: also a function, whose smallest value goes first.
    ``extra``: where extra forwards come among equals; with an ``order`` too, they find their place as ``W`` does.
    ``split``: backward runs as ``I`` and ``W``; ``W`` runs when nothing else can start as early. ``order``: ``F`` and
    ``B`` of each rank run as given there, only ``W`` finds its place.

    Under a cap a forward starts only if the rank's later stages still fit one microbatch each beside what is live.
    So the furthest microbatch can always go on, and no cap that lets one microbatch through deadlocks. Of several
    backbones each leaves the room that the others need to go on: so it must let one microbatch of each through.

    Raises:
        InfeasibleError: the cap does not let a single microbatch of each backbone through, or not in the given order.
    """
    board = _Board(problem, microbatches, prefer, cap, split, order, extra)
    best = [board.candidate(rank) for rank in range(problem.num_ranks)]
    rows: list[list[Action]] = [[] for _ in best]
    while True:
        start, rank, action = min(best)  # no two have one rank, so actions are never compared
        if action is None:
            break
        rows[rank].append(action)
        for touched in board.commit(rank, action, start):
            best[touched] = board.candidate(touched)
    if sum(map(len, rows)) < (3 if split else 2) * problem.num_stages * microbatches + len(problem.extra_actions):
        assert order is not None
        raise InfeasibleError("the given order does not fit the cap")
    return tuple(tuple(row) for row in rows)


class _Head(NamedTuple):
    """What could run next, and what it gives."""

    action: Action
    key: Key

    @classmethod
    def of(cls, action: Action) -> _Head:
        return cls(action, key_of(action))


class _Board:
    """What has run, what has arrived and what each rank could run next."""

    def __init__(
        self,
        problem: Problem,
        microbatches: int,
        prefer: Prefer | RankBy,
        cap: Cap | None,
        split: bool,
        order: Schedule | None,
        extra: Extra,
    ) -> None:
        self._problem, self._microbatches = problem, microbatches
        self._rank_by = None if isinstance(prefer, Prefer) else prefer
        self._prefer, self._cap, self._order = prefer, cap, order
        self._split, self._ops = split, SPLIT if split else WHOLE
        self._next: dict[tuple[int, Op], int] = defaultdict(int)
        self._stages = [problem.plan.stages_of(rank) for rank in range(problem.num_ranks)]
        free = self._ops if order is None else self._ops[2:]
        self._heads = [
            {(stage, op): _Head.of(Action(stage, op, 0)) for stage in stages for op in free} for stages in self._stages
        ]
        """Per rank, the next action of every stage and op; with a given order the next ``W`` of each stage."""
        self._outer = _first_stages(problem.placement)
        self._position = [0] * problem.num_ranks
        self._rank_free = [0.0] * problem.num_ranks
        self._ports = Ports()
        self._live = [0.0] * problem.num_ranks
        self._ready: dict[Key, float] = defaultdict(float)
        self._missing: dict[Key, int] = {}
        reserve = _fitting_reserves(problem.placement, cap) if cap else ()
        self._reserve = cap.weights if cap and order else reserve
        self._extra = [problem.plan.extra_forwards(stage) for stage in range(problem.num_stages)]
        self._has_extra = any(self._extra)
        self._extra_preference = extra.value
        self._parts = _held_by_backbone(problem.placement) if cap and order is None else []

    def candidate(self, rank: int) -> tuple[float, int, Action | None]:
        """Earliest start, rank and the rank's best next action; never and None when nothing can run yet."""
        free, ready = self._rank_free[rank], self._ready
        best: tuple[tuple[float, tuple[float, ...], int], Action] | None = None
        for action, key in self._open(rank):
            if self._can_run(rank, action, key):
                choice = (max(free, ready[key]), self._order_of(action), -action.stage)
                if best is None or choice < best[0]:
                    best = choice, action
        return (best[0][0], rank, best[1]) if best else (float("inf"), rank, None)

    def _open(self, rank: int) -> Iterable[_Head]:
        """What the rank may run next."""
        heads = self._heads[rank].values()
        if self._order is None and not self._has_extra:
            return heads
        return [*heads, *self._open_extra(rank), *self._open_given(rank)]

    def _open_given(self, rank: int) -> Iterator[_Head]:
        """The next action of a given order."""
        row = () if self._order is None else self._order[rank]
        for given in row[self._position[rank] : self._position[rank] + 1]:
            op = given.op if given.op is Op.FORWARD else self._ops[1]
            yield _Head.of(Action(given.stage, op, given.microbatch))

    def _open_extra(self, rank: int) -> Iterator[_Head]:
        """The next extra forward of every stage."""
        for stage in self._stages[rank] if self._has_extra else ():
            at = self._next[stage, Op.EXTRA_FORWARD]
            yield from (_Head.of(Action(stage, Op.EXTRA_FORWARD, m)) for m in self._extra[stage][at : at + 1])

    def _order_of(self, action: Action) -> tuple[float, ...]:
        return (self._preference(action),) if self._rank_by is None else self._rank_by(action)

    def _preference(self, action: Action) -> int:
        if action.op is Op.EXTRA_FORWARD:
            return self._extra_preference
        if action.op is Op.WEIGHT_GRAD:
            return 2
        if self._prefer is Prefer.FIRST_HOME and not action.microbatch and action.stage not in self._outer:
            return -1
        return int((action.op is Op.FORWARD) == (self._prefer is Prefer.BACKWARD))

    def _can_run(self, rank: int, action: Action, key: Key) -> bool:
        if self._waits(action, key):
            return False
        if action.op is Op.EXTRA_FORWARD:
            return True
        if action.op is Op.FORWARD:
            return self._cap is None or (
                self._live[rank] + self._reserve[action.stage] + self._others_need(rank, action.stage)
                <= self._cap.limits[rank] * (1 + _SLACK) + _SLACK
            )
        return self._prefer is not Prefer.ALL_FORWARDS or all(
            self._next[stage, Op.FORWARD] == self._microbatches for stage in self._stages[rank]
        )

    def _others_need(self, rank: int, stage: int) -> float:
        """What other backbones need on the rank to go on."""
        if len(self._problem.placement.starts) == 1 or not self._parts:
            return 0.0
        return sum(self._needs(stages) for stages in self._parts[rank] if stage not in stages)

    def _needs(self, stages: tuple[int, ...]) -> float:
        """Room for the rest of a backbone's first microbatch whose forwards are not all done, less what those before
        it free by then: their backwards can run in whatever room there is."""
        assert self._cap is not None
        done = [self._next[stage, Op.FORWARD] for stage in stages]
        first = min(done)
        if first == self._microbatches:
            return 0.0
        weights = [self._cap.weights[stage] for stage in stages]
        rest = sum(weight for weight, count in zip(weights, done, strict=True) if count == first)
        freed = sum(w * (first - self._next[s, self._ops[-1]]) for s, w in zip(stages, weights, strict=True))
        return max(0.0, rest - freed)

    def _waits(self, action: Action, key: Key) -> bool:
        missing = self._missing.get(key)
        if missing is None:
            missing = self._missing[key] = len(self._problem.step(action).needs)
        return missing > 0

    def commit(self, rank: int, action: Action, start: float) -> set[int]:
        """Run the action; returns the ranks whose choices may have changed."""
        end = self._rank_free[rank] = start + self._problem.duration_ms(action)
        self._go_on(rank, action.stage, action.op)
        if action.op not in (Op.WEIGHT_GRAD, Op.EXTRA_FORWARD):
            self._position[rank] += 1
        if self._cap and action.op in (Op.FORWARD, self._ops[-1]):
            weight = self._cap.weights[action.stage]
            self._live[rank] += weight if action.op is Op.FORWARD else -weight
        return {rank} | self._hand_over(action, end)

    def _go_on(self, rank: int, stage: int, op: Op) -> None:
        """To the next action of an op of a stage."""
        self._next[stage, op] += 1
        heads = self._heads[rank]
        if (stage, op) in heads:
            if self._next[stage, op] < self._microbatches:
                heads[stage, op] = _Head.of(Action(stage, op, self._next[stage, op]))
            else:
                del heads[stage, op]

    def _hand_over(self, action: Action, end: float) -> set[int]:
        """When what it gives is there; the ranks of those that wait for nothing more."""
        able = set()
        for given in self._problem.gives(action, split=self._split):
            time = end
            if given.way is not None:
                _, time = self._ports.send(given.way, end)
            if given.completes:
                key = given.reader
                left = self._missing[key] = self._missing.get(key, given.reader_needs) - 1
                self._ready[key] = max(self._ready[key], time)
                if not left:
                    able.add(given.rank)
        return able


def _first_stages(placement: Placement) -> set[int]:
    """Of each backbone on each rank."""
    first: dict[tuple[int, int], int] = {}
    for stage, rank in enumerate(placement):
        first.setdefault((rank, placement.backbone_of(stage)), stage)
    return set(first.values())


def _held_by_backbone(placement: Placement) -> list[list[tuple[int, ...]]]:
    """Per rank, its stages of each backbone."""
    return [
        [tuple(stage for stage in stages if placement[stage] == rank) for stages in placement.backbones]
        for rank in range(placement.num_ranks)
    ]


def reserves(placement: Placement, cap: Cap) -> list[float]:
    """Per stage: its weight and those of its rank's later stages of its backbone, so that a microbatch can go on."""
    found = [0.0] * len(placement)
    for stages in placement.backbones:
        after = [0.0] * placement.num_ranks
        for stage in reversed(stages):
            after[placement[stage]] += cap.weights[stage]
            found[stage] = after[placement[stage]]
    return found


def _fitting_reserves(placement: Placement, cap: Cap) -> tuple[float, ...]:
    """The same; a microbatch of all backbones must fit each rank's limit."""
    reserve, needs = reserves(placement, cap), [0.0] * placement.num_ranks
    for stage in sorted(_first_stages(placement)):
        needs[placement[stage]] += reserve[stage]
    lacking = [r for r, need in enumerate(needs) if need > cap.limits[r] * (1 + _SLACK) + _SLACK]
    if lacking:
        lines = [f"rank {r} needs {needs[r]:,.0f} {cap.unit}, its limit is {cap.limits[r]:,.0f}" for r in lacking]
        raise InfeasibleError(
            "not even one microbatch in flight fits:\n  " + "\n  ".join(lines) + "\n"
            "use a smaller microbatch, more pipeline ranks, activation checkpointing, or raise the memory limit"
        )
    return tuple(reserve)
